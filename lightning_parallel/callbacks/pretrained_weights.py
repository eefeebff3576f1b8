"""`PretrainedWeights`: a fit that begins with the weights of files, of which each rank reads its own parts."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import TYPE_CHECKING

from lightning.pytorch import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_parallel.checkpoint.pretrained import Weights, WeightsOfModule, matched, open_weights, read_weights
from lightning_parallel.errors import CheckpointError, check
from lightning_parallel.module.differences import first_of
from lightning_parallel.ranks.objects import of_all_ranks

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class PretrainedWeights(Callback):
    """Begin a fit with weights of files: safetensors, a folder of Hugging Face, or a checkpoint.

    They are read when the module is sharded: each rank reads its own slices of safetensors files and of sharded
    checkpoints, so that no rank ever holds the whole model. Other files are mapped into memory, and read tensor by
    tensor. A module that is built in ``configure_model``, from a config and not by ``from_pretrained``, needs no more
    memory than its shards. Values are converted to the dtypes of the module. A fit that resumes from a checkpoint reads
    nothing here, and neither does another fit of the same module; a line says so.

    Args:
        path: A ``.safetensors`` file; a folder with ``model.safetensors``, or with its shards and their index, as
            ``save_pretrained`` of Hugging Face writes it; a checkpoint of Lightning, or of any strategy here; or a
            ``state_dict`` that `torch.save` has written.
        prefix: What the module has in front of the names in the files: ``"model."`` for a Hugging Face model in
            ``self.model``. By default the one with which most names are names of the module.
        strict: Whether each tensor below the prefix, and each in the files, must have its counterpart. A tied weight
            needs one of its names. Without it, a line says which have none.

    Raises:
        CheckpointError: At the start of the fit, if the files cannot be read; on all ranks.
        ConfigurationError: With all names and shapes that do not fit; on all ranks.

    Example:
        >>> Trainer(strategy="fsdp_custom", devices=8, callbacks=[PretrainedWeights("Llama-3.2-1B")])
    """

    def __init__(self, path: str | Path, prefix: str | None = None, strict: bool = True) -> None:
        self.path, self.prefix, self.strict = Path(path).expanduser().absolute(), prefix, strict
        self._module: weakref.ref[LightningModule] | None = None

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        is_known, self._module = self._module is not None and self._module() is pl_module, None
        if is_known or trainer.ckpt_path is not None:
            self._module = weakref.ref(pl_module)
            reason = "which has trained on them already" if is_known else f"which resumes from {trainer.ckpt_path}"
            rank_zero_info(f"PretrainedWeights: nothing is read into a module {reason}")
            return
        weights, found, problem = self._look(pl_module)
        # All ranks alike: others would wait for one that cannot read its files, or has other ones.
        _raise_everywhere(problem)
        check([f"PretrainedWeights: {self.path}: {e}" for e in next(filter(None, of_all_ranks(found.violations)), ())])
        assert weights is not None
        _raise_everywhere(self._read(pl_module, weights, found))
        self._module = weakref.ref(pl_module)
        rank_zero_info(f"PretrainedWeights: {len(found.names)} tensors from {self.path}{_without(found)}")

    def _look(self, module: LightningModule) -> tuple[Weights | None, WeightsOfModule, str]:
        try:
            weights = open_weights(self.path)
        except CheckpointError as error:
            return None, WeightsOfModule(), str(error)
        except Exception as error:  # of the library that reads the format: any, of a damaged file
            return None, WeightsOfModule(), self._unreadable(error)
        return weights, matched(module, weights.described, self.prefix, strict=self.strict), ""

    def _read(self, module: LightningModule, weights: Weights, found: WeightsOfModule) -> str:
        try:
            read_weights(module, weights, found.names)
        except Exception as error:  # of a file that ends early, or a full memory, on one rank
            return self._unreadable(error)
        return ""

    def _unreadable(self, error: Exception) -> str:
        return f"{self.path} cannot be read ({type(error).__name__}: {error}); give another one"


def _raise_everywhere(problem: str) -> None:
    """Raise the problem of the first rank that has one. A collective."""
    for rank, each in enumerate(of_all_ranks(problem)):
        if each:
            raise CheckpointError(f"PretrainedWeights: {each}" + (f" (rank {rank})" if rank else ""))


def _without(found: WeightsOfModule) -> str:
    missing = f"; not in the files: {first_of(found.missing)}" if found.missing else ""
    return missing + (f"; not in the module: {first_of(found.unexpected)}" if found.unexpected else "")

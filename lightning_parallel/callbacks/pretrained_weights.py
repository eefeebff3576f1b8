"""`PretrainedWeights`: a fit that begins with the weights of files, of which each rank reads its own parts."""

from __future__ import annotations

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
    nothing here, and neither does a second fit.

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
        self._is_done = False

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._is_done or trainer.ckpt_path is not None:
            self._is_done = True
            return
        weights, found, problem = self._look(pl_module)
        # All ranks alike: others would wait for one that cannot read its files, or has other ones.
        problems, violations = zip(*of_all_ranks((problem, found.violations)), strict=True)
        for rank, each in enumerate(problems):
            if each:
                raise CheckpointError(f"PretrainedWeights: {each}" + (f" (rank {rank})" if rank else ""))
        check([f"PretrainedWeights: {self.path}: {each}" for each in next(filter(None, violations), ())])
        assert weights is not None
        assert found.names is not None
        read_weights(pl_module, weights, found.names)
        self._is_done = True
        rank_zero_info(f"PretrainedWeights: {len(found.names)} tensors from {self.path}{_without(found)}")

    def _look(self, module: LightningModule) -> tuple[Weights | None, WeightsOfModule, str]:
        try:
            weights = open_weights(self.path)
        except CheckpointError as error:
            return None, WeightsOfModule(), str(error)
        except Exception as error:  # of the library that reads the format: any, of a damaged file
            return (
                None,
                WeightsOfModule(),
                f"{self.path} cannot be read ({type(error).__name__}: {error}); give another one",
            )
        return weights, matched(module, weights.described, self.prefix, strict=self.strict), ""


def _without(found: WeightsOfModule) -> str:
    missing = f"; not in the files: {first_of(found.missing)}" if found.missing else ""
    return missing + (f"; not in the module: {first_of(found.unexpected)}" if found.unexpected else "")

"""The number of samples of one optimizer step: the loader's batch, the ranks that read, the microsteps; its tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from lightning_parallel import _lightning

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

_LATE_HOOKS = ("setup", "configure_model")


@dataclass(frozen=True)
class Microstep:
    """The samples of one backward over all ranks.

    Args:
        batch_size: Samples of one rank.
        num_readers: Ranks that read different samples.
    """

    batch_size: int
    num_readers: int

    @property
    def num_samples(self) -> int:
        """Samples over all ranks."""
        return self.batch_size * self.num_readers

    def __str__(self) -> str:
        return f"batch_size {self.batch_size} x {self.num_readers} rank{'s' if self.num_readers > 1 else ''}"


def num_samples(batch: Any) -> float:
    """The size of the first dimension of the first tensor; not a number where there is none."""
    sizes = (len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim)
    return next(sizes, float("nan"))


def num_readers(trainer: Trainer) -> int:
    """The ranks that read different samples: the data-parallel degree; 1 in one process.

    Args:
        trainer: Its strategy has set up its environment.
    """
    if not _lightning.is_distributed(trainer):
        return 1
    kwargs = trainer.distributed_sampler_kwargs or {}
    return int(kwargs.get("num_replicas", 1))


def early_loaders(trainer: Trainer) -> tuple[Any, list[str]]:
    """The training loaders, if they are available before the module's `setup` has run.

    Lightning asks the source again when training begins, so the random state is restored here.

    Args:
        trainer: In `Callback.setup` of a fit. A data module's own `setup` has run by then.

    Returns:
        The loader or the collection of loaders, ``None`` if it is not available; and the reasons.
    """
    source = _lightning.training_source(trainer)
    if isinstance(source.instance, LightningModule):
        late = [name for name in _LATE_HOOKS if is_overridden(name, source.instance)]
        if late:
            name = type(source.instance).__name__
            return None, [
                f"the training loader comes from {name}.train_dataloader, which may need what {name}.{late[0]} makes, "
                "and that runs only later; give batch_size=, or pass the loader or a data module to fit"
            ]
    with isolate_rng():
        return _lightning.request_loaders(source), []


def batch_size_of(loaders: object, given: int | None) -> tuple[int, list[str]]:
    """The samples that one rank reads for one microstep, and the reasons if they are not known.

    Args:
        loaders: The training loader or a collection of loaders; ``None`` where they are not known yet.
        given: The user's `batch_size`, if any. It has to be the loader's where the loader says its own.

    Returns:
        The size, 0 if it is not known; and the violations.
    """
    own, reason = _own_batch_size(loaders)
    if given is None:
        return own or 0, [reason] if reason else []
    if own not in (None, given):
        return own or 0, [f"batch_size={given} was given, but the training loader has batch_size={own}; leave it out"]
    return given, []


def _own_batch_size(loaders: object) -> tuple[int | None, str]:
    """The batch size of the loader, or the reason why it has none; neither for ``None``."""
    if loaders is None:
        return None, ""
    collection = loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders, "max_size_cycle")
    if len(collection.flattened) != 1:
        return None, (
            f"there are {len(collection.flattened)} training loaders, and which samples count is the module's affair; "
            "give batch_size=, the samples of one training_step"
        )
    loader = collection.flattened[0]
    if not isinstance(loader, DataLoader):
        return None, f"the training loader is a {type(loader).__name__}, not a torch DataLoader; give batch_size="
    if loader.batch_size is None and loader.batch_sampler is not None:
        return None, "the training loader has a batch_sampler, whose batches may be of any size; give batch_size="
    if loader.batch_size is None:
        return None, "the training loader has batch_size=None, so its data set makes the batches; give batch_size="
    return loader.batch_size, ""


def num_tokens(batch: Any, num_samples: int) -> int | None:
    """The tokens of a batch: the elements of ``input_ids``, else of the first tensor of integers `[samples, length]`.

    Args:
        batch: Any collection of tensors.
        num_samples: The number of its samples.

    Returns:
        Their number; ``None`` if the batch has no such tensor.
    """
    named = batch.get("input_ids") if isinstance(batch, Mapping) else None
    leaves = [named] if isinstance(named, Tensor) else tree_leaves(batch)
    for leaf in leaves:
        is_integral = isinstance(leaf, Tensor) and leaf.dtype in (torch.int64, torch.int32)
        if is_integral and leaf.ndim == 2 and len(leaf) == num_samples:
            return int(leaf.numel())
    return None


def size_violations(**sizes: int | None) -> list[str]:
    """One for each size that is given and is less than 1."""
    return [
        f"{name}={size} is no number of samples; give 1 or more"
        for name, size in sizes.items()
        if size is not None and size < 1
    ]

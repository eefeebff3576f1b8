"""A run of a recipe's Trainer, timed: a callback, and a loader whose batches fit the cell."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

from lightning_parallel.bench.stopwatch import Stopwatch
from lightning_parallel.callbacks.batch_geometry import num_readers
from lightning_parallel.errors import ConfigurationError

if TYPE_CHECKING:
    from lightning.pytorch import LightningDataModule, LightningModule, Trainer

_OWN_BATCHES = (
    "so its batches cannot be divided or joined; give a loader with a batch_size, or --scaling=weak and names that "
    "keep the batch of a rank"
)
_KEPT = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "drop_last",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
)
"""Taken over by a loader with other batches, besides the data set and the order of samples."""


class TimedSteps(Callback):
    """Tells a stopwatch where each step begins, and ends the fit when all is measured.

    Args:
        watch: The stopwatch.
    """

    def __init__(self, watch: Stopwatch) -> None:
        self._watch = watch
        self._microsteps = 0
        self._readers = 1

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._watch.device = trainer.strategy.root_device
        self._readers = num_readers(trainer)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        accumulated = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
        is_first = self._microsteps % accumulated == 0
        self._microsteps += 1
        if is_first and not trainer.should_stop:
            trainer.should_stop = not self._watch.begin_step(batch, self._readers * accumulated)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._watch.close()


def size_batches(module: LightningModule, data: LightningDataModule | None, global_batches: int) -> None:
    """Let the ranks that read different samples share `global_batches` batches of the recipe's loader.

    Args:
        module: The recipe's module.
        data: Its data module, if it has one.
        global_batches: The global batch of a microstep, in batches of the loader.
    """
    holder = _with_train_loader(module, data)
    own = holder.train_dataloader

    def train_dataloader() -> Any:
        return resized(own(), global_batches, num_readers(holder.trainer))

    holder.train_dataloader = train_dataloader


def resized(loader: Any, global_batches: int, readers: int) -> Any:
    """`loader` with batches of ``batch_size * global_batches / readers`` samples; itself where that is its own size.

    Args:
        loader: The recipe's training loader.
        global_batches: The global batch, in batches of it.
        readers: The number of ranks that read different samples.

    Raises:
        ConfigurationError: If batches do not come out even, or belong to the loader.
    """
    if global_batches == readers:
        return loader
    if not isinstance(loader, DataLoader) or loader.batch_size is None:
        name = type(loader).__name__
        raise ConfigurationError([f"the training loader is a {name} without a batch_size, {_OWN_BATCHES}"])
    total = loader.batch_size * global_batches
    if total % readers:
        text = f"a global batch of {total} samples does not divide over {readers} ranks; give a batch_size or --devices"
        raise ConfigurationError([f"{text} with which it does"])
    return with_batches(loader, total // readers, loader.sampler)


def with_batches(loader: DataLoader[Any], batch_size: int, sampler: Any) -> DataLoader[Any]:
    """`loader` with other batches.

    Args:
        loader: Any loader that makes batches by itself.
        batch_size: Samples of a batch.
        sampler: The order of samples; an iterable data set has its own.
    """
    order: dict[str, Any] = {} if isinstance(loader.dataset, IterableDataset) else {"sampler": sampler}
    same = {name: getattr(loader, name) for name in _KEPT}
    return DataLoader(loader.dataset, batch_size=batch_size, **order, **same)


def train_loader_of(module: LightningModule, data: LightningDataModule | None) -> Any:
    """The training loader of a recipe.

    Args:
        module: The recipe's module.
        data: Its data module, if it has one.
    """
    return _with_train_loader(module, data).train_dataloader()


def _with_train_loader(module: LightningModule, data: LightningDataModule | None) -> Any:
    return data if data is not None and is_overridden("train_dataloader", data) else module

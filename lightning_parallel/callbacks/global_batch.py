"""`GlobalBatch`: the same number of samples a step on any number of ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_parallel import _lightning
from lightning_parallel.callbacks.batch_geometry import (
    Microstep,
    batch_size_of,
    early_loaders,
    num_readers,
    size_violations,
)
from lightning_parallel.callbacks.strategy_protocol import refuse, updates_in_backward
from lightning_parallel.errors import check
from lightning_parallel.ranks.divisibility import divisors, listed

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class GlobalBatch(Callback):
    """Take `size` samples an optimizer step on any number of ranks, by gradient accumulation.

    `trainer.accumulate_grad_batches` becomes ``size / (batch size of the loader x ranks that read)``. It is settled
    before `configure_optimizers`, so `trainer.estimated_stepping_batches` is right there, and given back after `fit`.

    Args:
        size: Samples of one optimizer step over all ranks.
        batch_size: Samples that one rank reads for one `training_step`, where the loader does not say: several
            loaders, a `batch_sampler`, ``batch_size=None``, a loader made by a module that has a `setup` of its own.

    Raises:
        ConfigurationError: At the start of `fit`, with every reason at once and the sizes that are possible.

    Example:
        >>> Trainer(strategy="fsdp_custom", devices=4, callbacks=[GlobalBatch(256)])
    """

    def __init__(self, size: int, *, batch_size: int | None = None) -> None:
        check(size_violations(size=size, batch_size=batch_size))
        self._size = size
        self._batch_size = batch_size
        self._microstep: Microstep | None = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        loaders, violations = early_loaders(trainer) if self._batch_size is None else (self._known_loaders(trainer), [])
        batch_size, found = batch_size_of(loaders, self._batch_size)
        violations = [*_other_accumulation(trainer, pl_module), *violations, *found]
        microstep = Microstep(batch_size, num_readers(trainer))
        if batch_size:
            violations += _size_violations(self._size, microstep, in_backward=updates_in_backward(trainer))
        refuse(trainer, violations)
        self._microstep = microstep
        trainer.accumulate_grad_batches = self._size // microstep.num_samples
        rank_zero_info(
            f"GlobalBatch: {self._size} samples a step = {microstep} x {trainer.accumulate_grad_batches} microsteps"
        )

    @staticmethod
    def _known_loaders(trainer: Trainer) -> object:
        """The loaders given to `fit`; those that a module makes are checked when training begins."""
        source = _lightning.training_source(trainer)
        return None if source.is_module() else source.instance

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._check_loader(trainer)

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._check_loader(trainer)  # it may be another one in each epoch

    def _check_loader(self, trainer: Trainer) -> None:
        assert self._microstep is not None
        settled = self._microstep.batch_size
        size, found = batch_size_of(trainer.train_dataloader, self._batch_size)
        if not found and size != settled:
            found = [
                f"the training loader has batch_size={size} now, but had batch_size={settled} when accumulation was "
                f"settled for GlobalBatch({self._size}); keep it the same during fit"
            ]
        refuse(trainer, found)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._give_back(trainer)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._give_back(trainer)

    def _give_back(self, trainer: Trainer) -> None:
        if self._microstep is not None:
            trainer.accumulate_grad_batches = 1
            self._microstep = None


def _other_accumulation(trainer: Trainer, module: LightningModule) -> list[str]:
    found = []
    if not module.automatic_optimization:
        found.append(
            "GlobalBatch accumulates gradients, which is the module's own affair under manual optimization; "
            "leave GlobalBatch out, or set automatic_optimization=True"
        )
    if trainer.accumulate_grad_batches != 1:
        found.append(
            f"accumulate_grad_batches={trainer.accumulate_grad_batches} was given to the Trainer, and GlobalBatch "
            "derives it; leave one of the two out"
        )
    if any(isinstance(callback, GradientAccumulationScheduler) for callback in trainer.callbacks):  # type: ignore[attr-defined]
        found.append(
            "GradientAccumulationScheduler changes the global batch by epoch, and GlobalBatch keeps it the same; "
            "leave one of the two out"
        )
    return found


def _size_violations(size: int, microstep: Microstep, *, in_backward: bool) -> list[str]:
    """A violation that names the nearest possible sizes, batch sizes and numbers of ranks."""
    samples = microstep.num_samples
    if size % samples == 0:
        return _in_backward_violations(size, microstep) if in_backward and size > samples else []
    below = size // samples * samples
    sizes = [str(near) for near in (below, below + samples) if near]
    changes = [f"give size {' or '.join(sizes)}"]
    if batch_sizes := _divisors_near(size, microstep.num_readers, microstep.batch_size):
        changes.append(f"for size {size}, give the loader batch_size {batch_sizes}")
    if ranks := _divisors_near(size, microstep.batch_size, microstep.num_readers):
        changes.append(f"train on a number of ranks out of {ranks}")
    return [
        f"GlobalBatch(size={size}) is no multiple of the {samples} samples of a microstep ({microstep}); "
        f"{'; or '.join(changes)}"
    ]


def _in_backward_violations(size: int, microstep: Microstep) -> list[str]:
    return [
        f"GlobalBatch(size={size}) needs {size // microstep.num_samples} microsteps of {microstep}, but "
        "optimizer_in_backward=True uses each gradient up at once; "
        f"give size {microstep.num_samples}, a larger batch_size, or leave optimizer_in_backward out"
    ]


def _divisors_near(size: int, other: int, wanted: int) -> str:
    """The numbers whose product with `other` divides `size`, the five nearest to `wanted`."""
    rest = size // other if size % other == 0 else 0
    return listed(sorted(sorted(divisors(rest), key=lambda number: abs(number - wanted))[:5]))

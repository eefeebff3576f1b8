"""The largest batch size that fits, equal on all ranks, found without running out of memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.memory import garbage_collection_cuda, is_oom_error
from lightning.pytorch.utilities.parsing import lightning_hasattr, lightning_setattr
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_parallel import _lightning
from lightning_parallel.callbacks.size_search import largest_fitting
from lightning_parallel.callbacks.strategy_protocol import SettlesCut, cuts_stack, num_local_processes, refuse
from lightning_parallel.callbacks.trials import TrainingState, isolated, run_steps, settled
from lightning_parallel.errors import ConfigurationError, check
from lightning_parallel.ranks.memory import peak_memory, reset_peak_memory, usable_memory
from lightning_parallel.techniques.sharding import abandon_step

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

_OUT_OF_MEMORY = 2**62
_ALONE = (
    "{0}={1} ran out of memory on a rank of a pipeline, for which the others wait within the step; give "
    "BatchSizeFinder(maximum={2}) or a smaller memory_limit"
)


class BatchSizeFinder(Callback):
    """Before training, set the largest batch size that fits into the memory of every rank.

    Trials of growing size take a few optimizer steps each. Of each, the peak memory is measured, and the largest over
    the ranks counts. The next size is tried only if a line through the last two peaks says that it fits, so that no
    rank runs out of memory: one that does, alone, leaves the others waiting in a collective until the process group's
    timeout. Ranks that fail together go down together, except under DDP, whose step cannot be taken up again.

    Afterwards weights, buffers, optimizers, schedulers, random states and loops are those of before, and training
    equals training with that size from the start. `train_dataloader` has to read the attribute each time it is called.
    Hooks of the module that a step needs run in each trial (`on_train_start`, `on_train_epoch_start`, those of
    batches), other callbacks and loggers do not; `accumulate_grad_batches` stays as it is. A resumed run on as many
    ranks keeps the size of its checkpoint.

    Args:
        attribute: Where the size lives, for a rank: an attribute or hyperparameter of the module or datamodule.
        start: The first size to try, at least 2; one that is known to fit.
        maximum: The largest size to try; neither does it go beyond a rank's share of the samples.
        steps: Optimizer steps of a trial.
        memory_limit: Bytes for each rank; by default what the device has left for torch, or an equal share of the host.
        margin: The share of the limit that stays free, in ``[0, 1)``.
        measure: Device -> the most bytes this rank held there since the last call; called before and after each trial.
            By default `memory.peak_memory`.

    Raises:
        ConfigurationError: For settings out of range, a batch size that nothing reads, and a model that does not fit.

    Example:
        >>> Trainer(strategy="fsdp_custom", callbacks=[BatchSizeFinder()])
    """

    def __init__(
        self,
        *,
        attribute: str = "batch_size",
        start: int = 2,
        maximum: int = 8192,
        steps: int = 3,
        memory_limit: int | None = None,
        margin: float = 0.1,
        measure: Callable[[torch.device], int] | None = None,
    ) -> None:
        check(_violations(start, maximum, steps, memory_limit, margin))
        self._attribute = attribute
        self._start = start
        self._maximum = maximum
        self._steps = steps
        self._memory_limit = memory_limit
        self._margin = margin
        self._measure = measure or _peak_since_last_call
        self._is_restored = False
        self._num_ranks = 1
        self._loaded_sizes: dict[int, tuple[int, ...]] = {}
        self.batch_size: int | None = None
        """The size that was found, or restored from a checkpoint."""
        self.peaks: dict[int, float] = {}
        """Size of each trial -> bytes of the rank that took most, infinite if it did not fit."""

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            self._is_restored = False
            self._num_ranks = trainer.world_size
            refuse(trainer, _use_violations(trainer, pl_module, self._attribute))

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"batch_size": self.batch_size, "num_ranks": self._num_ranks}

    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        saved = checkpoint["callbacks"].get(self.state_key)
        if trainer.state.fn == TrainerFn.FITTING and saved is not None and saved["num_ranks"] == trainer.world_size:
            self._is_restored = True
            self.batch_size = saved["batch_size"]
            lightning_setattr(pl_module, self._attribute, self.batch_size)
            rank_zero_info(f"BatchSizeFinder: {self._attribute}={self.batch_size}, as in the checkpoint")

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._is_restored:
            return
        is_scheduled = _lightning.training_loaders(trainer) is not None  # configure_optimizers asked for the steps
        limit = -_largest(trainer, -(self._memory_limit or _memory_limit(trainer)))  # that of the smallest rank
        state = TrainingState(trainer)
        self._loaded_sizes = {}
        try:
            start, maximum = self._bounds(trainer)
            unit, state = settled(trainer, state, start, self._load)
            size, self.peaks = largest_fitting(
                lambda size: self._trial(trainer, state, size),
                start=start,
                maximum=maximum,
                budget=limit * (1 - self._margin),
                unit=unit,
            )
            if size and math.inf in self.peaks.values():
                self._trial(trainer, state, size)  # uses up gradients that the failed step left unreduced
        finally:
            _end_trials(trainer)
        refuse(trainer, self._misfit(size, limit))
        self.batch_size = size
        lightning_setattr(pl_module, self._attribute, size)
        if is_scheduled:
            self._configure_optimizers_again(trainer)
        rank_zero_info(
            f"BatchSizeFinder: {self._attribute}={size} on each of {trainer.world_size} ranks; peak "
            f"{_gib(self.peaks[size])} of {_gib(limit)} ({self._margin:.0%} are left free)"
        )

    def _misfit(self, size: int, limit: int) -> list[str]:
        if size:
            return []
        least = min(self.peaks)
        took = "ran out of memory" if math.isinf(self.peaks[least]) else f"takes {_gib(self.peaks[least])}"
        return [
            f"{self._attribute}={least} {took}, and may take {_gib(limit * (1 - self._margin))} (memory_limit less "
            f"{self._margin:.0%}); shard over more ranks, use a smaller model, or give a larger memory_limit"
        ]

    # Trials -----------------------------------------------------------------------------------------------------

    def _bounds(self, trainer: Trainer) -> tuple[int, int]:
        """The first size and the last: beyond a rank's share of the samples, batches do not grow any more."""
        with isolated(trainer):
            self._load(trainer, self._start)
            loaders = _lightning.training_loaders(trainer).flattened
            shares = [
                len(loader.sampler) * self._start // loader.batch_size
                for loader in loaders
                if getattr(loader, "batch_size", None) and hasattr(getattr(loader, "sampler", None), "__len__")
            ]
            _lightning.drop_loaders(trainer)
        maximum = min(self._maximum, max(shares, default=self._maximum))
        if isinstance(trainer.val_check_interval, int) and trainer.check_val_every_n_epoch is not None:
            maximum //= trainer.val_check_interval  # Lightning wants that many batches in an epoch
        return min(self._start, max(1, maximum)), max(1, maximum)

    def _load(self, trainer: Trainer, size: int) -> None:
        lightning_setattr(trainer.lightning_module, self._attribute, size)
        _lightning.drop_loaders(trainer)
        trainer.fit_loop.setup_data()
        loaders = _lightning.training_loaders(trainer).flattened
        sizes = tuple(loader.batch_size for loader in loaders if getattr(loader, "batch_size", None))
        self._loaded_sizes[size] = sizes
        for other, others in self._loaded_sizes.items():
            if sizes and sizes == others and 2 * min(size, other) <= max(size, other):
                refuse(
                    trainer,
                    [
                        f"train_dataloader() makes batches of {sizes[0]} for {self._attribute}={other} and for "
                        f"{self._attribute}={size}; let it build a DataLoader with batch_size=self.{self._attribute} "
                        "each time it is called"
                    ],
                )

    def _trial(self, trainer: Trainer, state: TrainingState, size: int) -> float:
        """The peak of the rank that takes most, the same on all ranks; infinite where one ran out of memory."""
        garbage_collection_cuda()
        device, module = trainer.strategy.root_device, trainer.lightning_module
        _forget_batches(trainer)  # else only some of the trials would try where losses are to be computed
        self._measure(device)
        peak = _OUT_OF_MEMORY
        with isolated(trainer):
            try:
                self._load(trainer, size)
                run_steps(trainer, self._steps)
                peak = self._measure(device)
            except RuntimeError as error:
                if not is_oom_error(error):
                    raise
                if cuts_stack(trainer):
                    raise ConfigurationError([_ALONE.format(self._attribute, size, max(1, size // 2))]) from error
            if peak == _OUT_OF_MEMORY:
                abandon_step(module)
            _lightning.drop_loaders(trainer)
        state.restore()
        agreed = _largest(trainer, peak)
        if agreed == _OUT_OF_MEMORY and isinstance(trainer.strategy.model, DistributedDataParallel):
            refuse(
                trainer,
                [
                    f"{self._attribute}={size} ran out of memory, and DDP cannot go on after that; give "
                    f"BatchSizeFinder(maximum={max(1, size // 2)}) or a smaller memory_limit"
                ],
            )
        return math.inf if agreed == _OUT_OF_MEMORY else float(agreed)

    def _configure_optimizers_again(self, trainer: Trainer) -> None:
        """Schedules made for the number of steps that another batch size takes are made again."""
        before = list(trainer.optimizers)
        trainer.strategy.setup_optimizers(trainer)
        if any(new is old for new, old in zip(trainer.optimizers, before, strict=True)):
            refuse(
                trainer,
                [
                    "configure_optimizers asks for the number of steps, which the batch size changes, but returns an "
                    "optimizer that was made before; make the optimizer there"
                ],
            )


def _end_trials(trainer: Trainer) -> None:
    """Drop what trials have made."""
    _lightning.drop_loaders(trainer)
    _forget_batches(trainer)


def _forget_batches(trainer: Trainer) -> None:
    """Let a pipeline begin as with the first batch."""
    if isinstance(steps := getattr(trainer.strategy, "steps", None), SettlesCut):
        steps.settling.forget()


def _memory_limit(trainer: Trainer) -> int:
    """Bytes that this rank may use."""
    return usable_memory(trainer.strategy.root_device, num_processes=num_local_processes(trainer))


def _peak_since_last_call(device: torch.device) -> int:
    peak = peak_memory(device)
    reset_peak_memory(device)
    return peak


def _largest(trainer: Trainer, number: int) -> int:
    """The largest of the ranks' numbers, on all ranks. A collective."""
    box = torch.tensor(number, dtype=torch.int64, device=trainer.strategy.root_device)
    if dist.is_initialized():  # not the strategy's reduction, which leaves out ranks that read the same samples
        dist.all_reduce(box, op=dist.ReduceOp.MAX)
    return int(box.item())


def _violations(start: int, maximum: int, steps: int, memory_limit: int | None, margin: float) -> list[str]:
    found = []
    if start < 2:
        found.append(f"start={start} must be at least 2: two sizes are needed to predict a third")
    if maximum < start:
        found.append(f"maximum={maximum} is less than start={start}; give maximum={start} or more")
    if steps < 1:
        found.append(f"steps={steps} must be at least 1")
    if memory_limit is not None and memory_limit < 1:
        found.append(f"memory_limit={memory_limit} must be a number of bytes, or left out")
    if not 0 <= margin < 1:
        found.append(f"margin={margin} must be at least 0 and less than 1, such as 0.1")
    return found


def _use_violations(trainer: Trainer, module: LightningModule, attribute: str) -> list[str]:
    found = []
    if not lightning_hasattr(module, attribute):
        found.append(
            f"neither {type(module).__name__}, its hyperparameters nor the datamodule has {attribute!r}; let "
            "train_dataloader() read such an attribute, or name another with BatchSizeFinder(attribute=...)"
        )
    if not _lightning.training_source(trainer).is_module():
        found.append(
            "loaders were passed to fit(), so no attribute changes their batch size; define train_dataloader() in the "
            "module or in a datamodule"
        )
    if trainer.fast_dev_run:  # type: ignore[attr-defined]
        found.append("fast_dev_run runs a batch of whatever size; leave BatchSizeFinder out there")
    return found


def _gib(number: float) -> str:
    return f"{number / 2**30:.3g} GiB"

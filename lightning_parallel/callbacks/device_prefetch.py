"""`DevicePrefetch`: the next batches are read, and copied to the device, while a step computes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from typing_extensions import override

from lightning_parallel import _lightning, _torch
from lightning_parallel.callbacks.device_copies import DeviceCopies, copies_aside
from lightning_parallel.callbacks.host_draws import HostDraws
from lightning_parallel.callbacks.meter_log import MeterLog
from lightning_parallel.callbacks.read_ahead import ReadAhead
from lightning_parallel.callbacks.read_reasons import TRAINING_DRAWS, Probe, draws_once, reason_against
from lightning_parallel.callbacks.strategy_protocol import state_of_steps
from lightning_parallel.errors import check

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

_PROBED = 2
"""Batches behind the first one that the main thread reads, to see who draws random numbers."""


class DevicePrefetch(Callback):
    """Read the next batches of training in a thread, and copy them to an accelerator, while a step computes.

    No number changes: batches come in the same order, and are those that the main thread would have read. Where they
    are drawn with random numbers of the main process, reading waits for its turn, or is not done ahead, which is said
    once. Checkpoints have the position of what the training was given. The thread reads no further than the epoch goes.

    On CUDA and XPU devices, tensors in lists, tuples and dictionaries are copied from pinned memory on a stream of
    their own, unless ``on_before_batch_transfer`` or ``transfer_batch_to_device`` of the module or the data module has
    to see them on the host. Not run on an accelerator.

    A data set is read earlier than without: one that hooks change between batches, or that keeps a connection for one
    thread, is not for it.

    Args:
        ahead: Batches that may wait for the training; each takes its memory on the device.

    Raises:
        ConfigurationError: If `ahead` is no number of batches, or if Python's or NumPy's default generator is drawn
            from while a batch is read ahead, for the first time behind the first three batches.

    Example:
        >>> Trainer(strategy="fsdp_custom", callbacks=[DevicePrefetch()])
    """

    def __init__(self, *, ahead: int = 2) -> None:
        check([_NO_NUMBER.format(ahead)] if ahead < 1 else [])
        self._ahead = ahead
        self._log = MeterLog("DevicePrefetch")
        self._reader: ReadAhead | None = None
        self._begin()

    def __getstate__(self) -> dict[str, Any]:
        """The thread is that of one trainer, and not of its copies."""
        return {**vars(self), "_reader": None, "_watch": None}

    def _begin(self) -> None:
        """Forget an earlier fit."""
        self._end()
        self._reason: str | None = None
        self._num_probed = 0

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin()

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        training = _lightning.epochs.training_pass(trainer)
        if training is None or training.num_taken == 0:
            return  # a step that reads by itself has read nothing yet
        # The first batch of an epoch is there: samplers have drawn, and ranks have agreed where it begins.
        if self._reason is None:
            self._refuse(reason_against(trainer))
        if not self._reason:
            _lightning.epochs.replace_iterator(trainer, lambda found: self._replaced(trainer, batch_idx, found))

    def _refuse(self, reason: str) -> None:
        self._reason = reason
        if reason:
            self._log.say(f"batches are not read ahead: {reason}")

    def _replaced(self, trainer: Trainer, batch_idx: int, found: Any) -> Any:
        """The iterator from which training goes on to read."""
        if isinstance(found, ReadAhead):
            return found
        watch = None if draws_once(trainer) else HostDraws(lambda: state_of_steps(trainer))
        if isinstance(found, Probe):
            self._num_probed += found.num_read
            found.num_read = 0
            if found.reason:
                self._refuse(found.reason)
                return found.inner
            if self._num_probed < _PROBED:
                return found
            found = found.inner
        elif watch is not None and self._num_probed < _PROBED:
            return Probe(found, trainer.strategy.root_device, watch)
        return self._read_ahead(trainer, batch_idx, found, watch)

    def _read_ahead(self, trainer: Trainer, batch_idx: int, inner: Any, watch: HostDraws | None) -> ReadAhead:
        copies = DeviceCopies(trainer.strategy.root_device) if _copies_ahead(trainer) else None
        default = torch.get_default_device()

        @contextlib.contextmanager
        def around(turn: Callable[[], None]) -> Iterator[None]:
            with contextlib.ExitStack() as stack:
                if default.type != "cpu":
                    stack.enter_context(default)
                if copies is not None:
                    stack.enter_context(copies.context())
                if watch is not None:
                    stack.enter_context(_torch.random_turns.drawing_in_turn(turn))
                yield

        def ready(item: Any) -> Callable[[], Any]:
            if copies is None:
                return lambda: item
            batches, *rest = item
            take = copies.begin(batches)
            return lambda: (take(), *rest)

        limit = min(_lightning.epochs.batches_left(trainer), _steps_left(trainer, batch_idx))
        self._watch = watch
        self._reader = ReadAhead(inner, ahead=self._ahead, limit=limit, around=around, ready=ready, watch=watch)
        return self._reader

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._reader is not None and trainer.state.fn == TrainerFn.FITTING:
            self._reader.pause()

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._reader is not None and trainer.state.fn == TrainerFn.FITTING:
            self._reader.resume()

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._reader is not None:
            self._reader.pause()
            if self._watch is not None and self._watch.is_drawn_by_training:
                self._refuse(TRAINING_DRAWS)
        self._end(trainer)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end(trainer)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._end(trainer)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._end(trainer)

    def _end(self, trainer: Trainer | None = None) -> None:
        """End the thread, and give the trainer its own iterator back."""
        reader, self._reader, self._watch = self._reader, None, None
        if reader is not None:
            reader.close()
        if trainer is not None:
            own = (ReadAhead, Probe)
            _lightning.epochs.replace_iterator(trainer, lambda found: found.inner if isinstance(found, own) else found)


def _copies_ahead(trainer: Trainer) -> bool:
    """Whether batches may be on the device before hooks see them."""
    hooks = ("on_before_batch_transfer", "transfer_batch_to_device")
    owners = [each for each in (trainer.lightning_module, getattr(trainer, "datamodule", None)) if each is not None]
    return (
        copies_aside(trainer.strategy.root_device)
        and not _lightning.fetchers.gives_iterator(trainer.fit_loop)
        and not any(is_overridden(name, owner) for name in hooks for owner in owners)
    )


def _steps_left(trainer: Trainer, batch_idx: int) -> float:
    """Batches that ``max_steps`` leaves behind this one, at most."""
    if trainer.max_steps < 0 or not trainer.lightning_module.automatic_optimization:
        return float("inf")
    microsteps = trainer.accumulate_grad_batches
    return max(0, (trainer.max_steps - trainer.global_step) * microsteps - batch_idx % microsteps - 1)


_NO_NUMBER = "DevicePrefetch(ahead={}) is no number of batches; give 1 or more"

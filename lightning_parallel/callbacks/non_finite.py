"""`NonFinite`: an update whose loss or gradients are not finite is skipped on all ranks; many end the run."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor
from torch.optim import LBFGS, Optimizer
from typing_extensions import override

from lightning_parallel.callbacks.read_batches import ReadBatch, StepRead, gather_steps, write_steps
from lightning_parallel.callbacks.strategy_protocol import refuse, updates_in_backward
from lightning_parallel.callbacks.token_weighted import TokenWeighted
from lightning_parallel.errors import NonFiniteError, check
from lightning_parallel.module.optimizer_hooks import register_update_hooks
from lightning_parallel.techniques.clipping import gradients_are_finite

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class NonFinite(Callback):
    """Skip an update on all ranks where the loss of a rank, or a gradient, is not finite; end the run after many.

    A skipped update leaves parameters, states of the optimizer and the average of `ExponentialMovingAverage` as they
    are, as if the batches of its window were not there. Everything else goes on: ``trainer.global_step`` counts it, and
    learning rate schedulers step, as under Lightning where a loss scaler skips. Gradients stay for whoever reads them,
    and are hidden from the optimizer while it steps; torch's optimizers leave out a parameter without a gradient.

    Skipped updates are counted, logged at each step, and kept in checkpoints. After `max_consecutive` in a row of one
    optimizer the run ends. A JSON file, in the logger's folder or else in ``trainer.default_root_dir``, then has the
    batches of these steps: for each rank whether its own losses were finite, and the indices of the samples that it
    read. They are ``null`` where the order of the loader cannot be drawn again: where it is random by a
    `RandomSampler`, and with a data set or a sampler of the user's own making.

    In fp16, gradients that are not finite belong to the loss scaler, which skips such steps while it looks for its
    scale. They are not counted there; a loss that is not finite is.

    Each step costs one pass over a rank's gradients and one all-reduce of a number over all ranks. The host reads it,
    so it waits until backward has run on the device.

    Under manual optimization, losses given to `manual_backward` count for the next step of any optimizer, and gradients
    for the step of their own.

    Args:
        max_consecutive: The number of skipped updates in a row that ends the run, at least 1.
        name: The name of the number of skipped updates in the log.

    Raises:
        ConfigurationError: For less than one update; at the start of `fit`, for an optimizer whose updates cannot be
            skipped, and under a strategy that updates during backward.
        NonFiniteError: During `fit`, after that many updates in a row.

    Example:
        >>> Trainer(strategy="fsdp_custom", devices=4, callbacks=[NonFinite()])
    """

    def __init__(self, max_consecutive: int = 10, *, name: str = "non_finite_steps") -> None:
        few = f"max_consecutive={max_consecutive} is no number of skipped updates; give 1 or more, such as 10"
        check([few] if max_consecutive < 1 else [])
        self._max_consecutive = max_consecutive
        self._name = name
        self.num_skipped = 0
        """Updates that were skipped so far, also before a resume."""
        self._in_a_row: list[list[StepRead]] = []
        """The latest steps of each optimizer, as long as they are skipped ones."""
        self._updates: list[_Updates] = []
        self._window: list[ReadBatch] = []
        """The batches since the last step."""
        self._batch = ReadBatch(0, 0)
        self._first_of_epoch: int | None = None
        self._loss: Tensor | None = None
        self._is_finite: Tensor | None = None
        """Whether the losses since the last step were finite on this rank."""
        self._of_batch: list[bool] = []
        """For each step of this batch, whether it was skipped."""

    @property
    def has_skipped_batch(self) -> bool:
        """Whether all steps of this batch were skipped, so that nothing has changed."""
        return bool(self._of_batch) and all(self._of_batch)

    # State ------------------------------------------------------------------------------------------------------

    @override
    def state_dict(self) -> dict[str, Any]:
        rows = [[step.state_dict() for step in row] for row in self._in_a_row]
        return {"num_skipped": self.num_skipped, "in_a_row": rows}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.num_skipped = state_dict["num_skipped"]
        self._in_a_row = [[StepRead.of_state(step) for step in row] for row in state_dict["in_a_row"]]

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and updates_in_backward(trainer):
            refuse(
                trainer,
                [
                    "NonFinite skips an update when all gradients are there, but optimizer_in_backward=True makes it "
                    "while they come; leave one of the two out"
                ],
            )

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        refuse(trainer, [*_violations(trainer.optimizers)])
        self._detach()
        self._updates = [_Updates(optimizer) for optimizer in trainer.optimizers]
        if trainer.global_step == 0:  # another run of the same callback
            self.num_skipped, self._in_a_row = 0, []
        if len(self._in_a_row) != len(self._updates):
            self._in_a_row = [[] for _ in self._updates]
        self._window, self._of_batch, self._first_of_epoch = [], [], None
        self._loss = self._is_finite = None

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._detach()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._detach()

    def _detach(self) -> None:
        for updates in self._updates:
            updates.detach()
        self._updates = []

    # What a window has read, and its losses ---------------------------------------------------------------------

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._first_of_epoch = None

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._first_of_epoch is None:
            self._first_of_epoch = batch_idx
        # A step that draws batches by itself has indices of which Lightning warrants nothing.
        draws = "dataloader_iter" in inspect.signature(pl_module.training_step).parameters
        position = None if draws else batch_idx - self._first_of_epoch
        self._batch = ReadBatch(trainer.current_epoch, batch_idx, position, trainer.train_dataloader)
        self._of_batch = []

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self._loss = loss.detach()

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._batch not in self._window:
            self._window.append(self._batch)
        loss, self._loss = self._loss, None
        if loss is None:
            return
        is_finite = loss.isfinite().all()
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            # Only now: which of the two callbacks comes first in `on_before_backward` is the user's affair.
            if isinstance(callback, TokenWeighted) and (nothing := callback.weighs_nothing) is not None:
                is_finite = is_finite | nothing.to(is_finite.device)
        self._is_finite = is_finite if self._is_finite is None else self._is_finite & is_finite

    # Updates ----------------------------------------------------------------------------------------------------

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        plain = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        number = next(number for number, each in enumerate(self._updates) if each.optimizer is plain)
        updates, row = self._updates[number], self._in_a_row[number]
        own, self._is_finite = self._is_finite, None
        updates.is_skipped = not self._agree(trainer, own, updates)
        self._of_batch.append(updates.is_skipped)
        if updates.is_skipped:
            self.num_skipped += 1
            read = tuple(self._window) or (self._batch,)
            row.append(StepRead(trainer.global_step, read, None if own is None else bool(own)))
        else:
            row.clear()
        self._window = []
        pl_module.log(self._name, float(self.num_skipped))

    def _agree(self, trainer: Trainer, losses: Tensor | None, updates: _Updates) -> bool:
        """Whether the losses and gradients of all ranks are finite. A collective."""
        found = [] if losses is None else [losses]
        if not _scales_losses(trainer):
            found.append(gradients_are_finite(updates.parameters()))
        device = trainer.strategy.root_device
        is_bad = torch.stack([each.to(device) for each in found]).logical_not().any() if found else torch.tensor(False)
        # Of all ranks, also those that read the same samples: stages and shards have gradients of their own.
        num_bad = trainer.strategy.reduce(is_bad.to(device, torch.float32), group=dist.group.WORLD, reduce_op="sum")
        return float(num_bad) == 0

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        for number, row in enumerate(self._in_a_row):
            # Only behind a step: a run that goes on from the end of another one has its row, and may do better.
            if any(self._of_batch) and len(row) >= self._max_consecutive:
                self._end(trainer, row, _name_of(trainer.optimizers, number))

    def _end(self, trainer: Trainer, row: Sequence[StepRead], optimizer: str) -> None:
        settings = {"optimizer": optimizer, "max_consecutive": self._max_consecutive}
        content = {**settings, "steps": gather_steps(row)}
        path, error = write_steps(trainer, f"{self._name}_{trainer.global_step}.json", content)
        if trainer.global_rank != 0:
            raise NonFiniteError("updates were skipped in a row; rank 0 says which")
        raise NonFiniteError(_in_words(content, path, error))


class _Updates:
    """The updates of an optimizer, which can be skipped, by hooks on it; `detach` removes them.

    Args:
        optimizer: Leaves out parameters without a gradient, as all of torch do but LBFGS.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.is_skipped = False
        """Whether the next update is skipped."""
        self._hidden: list[tuple[Tensor, Tensor]] = []
        self._handles = register_update_hooks(optimizer, before=self._hide, after=self._give_back)

    def detach(self) -> None:
        """Remove the hooks."""
        self._give_back()
        for handle in self._handles:
            handle.remove()

    def parameters(self) -> Iterator[Any]:
        """The parameters of all groups."""
        return (parameter for group in self.optimizer.param_groups for parameter in group["params"])

    def _hide(self) -> None:
        # Only here, behind all hooks and clipping: those of the user may count on gradients, and so does a loss scaler.
        if self.is_skipped:
            for parameter in self.parameters():
                if parameter.grad is not None:
                    self._hidden.append((parameter, parameter.grad))
                    parameter.grad = None

    def _give_back(self) -> None:
        for parameter, gradient in self._hidden:
            parameter.grad = gradient
        self._hidden, self.is_skipped = [], False


def has_skipped_batch(trainer: Trainer) -> bool:
    """Whether a `NonFinite` of `trainer` has skipped all updates of this batch, so that nothing has changed."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    return any(callback.has_skipped_batch for callback in callbacks if isinstance(callback, NonFinite))


def _scales_losses(trainer: Trainer) -> bool:
    """Whether a loss scaler looks for gradients that are not finite, and skips their steps."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return scaler is not None and scaler.is_enabled()


def _violations(optimizers: Sequence[Any]) -> Iterator[str]:
    for optimizer in optimizers:
        if isinstance(optimizer, LBFGS):
            yield (
                "NonFinite skips whole updates, but LBFGS looks at several losses in one and has moved parameters by "
                "then; leave NonFinite out, or give another optimizer"
            )
        elif not isinstance(optimizer, Optimizer):
            name = type(optimizer).__name__
            yield f"{name} is no torch.optim.Optimizer, so its steps have no hooks to skip them; leave NonFinite out"


def _name_of(optimizers: Sequence[Any], number: int) -> str:
    name = type(optimizers[number]).__name__
    return f"{name} {number}" if len(optimizers) > 1 else name


def _in_words(content: Mapping[str, Any], path: str, error: str) -> str:
    optimizer, most, steps = content["optimizer"], content["max_consecutive"], content["steps"]
    first, last = steps[0]["global_step"], steps[-1]["global_step"]
    losses = {(each["rank"], each["loss_is_finite"]) for step in steps for each in step["ranks"]}
    bad = sorted(rank for rank, is_finite in losses if is_finite is False)
    ranks = f"rank{'s' if len(bad) > 1 else ''} {', '.join(map(str, bad))}"
    what = f"the loss was not finite on {ranks}" if bad else "gradients were not finite, though all losses were"
    if not bad and any(is_finite is None for _, is_finite in losses):  # of steps before a resume
        what = "the loss or gradients were not finite"
    where = f"could not be written to {path} ({error})" if error else f"are in {path}"
    return (
        f"{len(steps)} updates of {optimizer} in a row were skipped, from global_step={first} to {last}, and "
        f"max_consecutive={most} of NonFinite ends the run: {what}. The batches of each rank "
        f"{where}. If their samples are at fault, leave them out; if training diverges, resume from a checkpoint well "
        f"before step {first} with a lower learning rate or with gradient clipping"
    )

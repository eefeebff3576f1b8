"""Make a plain mean loss exact where microsteps and ranks hold unequal numbers of valid tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from lightning_parallel import _torch
from lightning_parallel.callbacks.batch_geometry import num_readers
from lightning_parallel.callbacks.strategy_protocol import (
    cuts_batches,
    refuse,
    replica_devices,
    updates_in_backward,
    weigh_parts,
)
from lightning_parallel.errors import ConfigurationError
from lightning_parallel.techniques.clipping import scale_gradients

Count = Callable[[Any], Any]  # a number or a tensor of one: the command line takes no union here
_HINT = "give TokenWeighted(count=...), a function of the batch that returns what the loss averages over"


class TokenWeighted(Callback):
    """Weight each microstep's loss with its number of valid tokens, over all microsteps and ranks of a window.

    The mean over a microstep, averaged over microsteps and ranks, weights a token of a short sequence more than one of
    a long sequence. With this callback the gradient is that of the mean over all valid tokens of the window, as in one
    large batch, and `training_step` stays as it is. What the module logs stays its own.

    The number is that over which the loss averages. By default it is observed: the targets that `cross_entropy` or
    `nll_loss` do not ignore. Where the loss is another one, count an element of the batch, or give a function.

    Under manual optimization the weights have a mean of 1 over the window, and its scale stays the module's own.
    Under a pipeline the microbatches of a batch are weighted as well.

    Args:
        count: A function of the batch that returns the number of valid tokens.
        key: In place of it, the key or index of the element of the batch whose valid entries are counted.
        ignore_index: The entry of that element that does not count: -100 for labels, 0 for an attention mask.
        log: Name under which the exact mean loss of each window is logged; not under manual optimization.

    Raises:
        ConfigurationError: At the start or in the first step, if nothing can be counted or weighted.

    Example:
        >>> Trainer(strategy="fsdp_custom", callbacks=[TokenWeighted()])
    """

    weighs_losses = True
    """Read by the first step, which otherwise says where the mean over ranks is not the loss of all samples."""

    def __init__(
        self,
        count: Count | None = None,
        *,
        key: str | int | None = None,
        ignore_index: int = -100,
        log: str | None = None,
    ) -> None:
        if count is not None and key is not None:
            raise ConfigurationError([f"TokenWeighted has both count and key={key!r}; give one of the two"])
        self._count = count
        self._key = key
        self._ignore_index = ignore_index
        self._log = log
        self._observer: LossObserver | None = None
        self._given: Tensor | None = None
        self._unit: Tensor | None = None
        self._window = _Window()
        self._device, self._is_in_parts = torch.device("cpu"), False

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        found = []
        if len(trainer.optimizers) > 1:
            found.append(
                f"TokenWeighted weights the window of one optimizer, but there are {len(trainer.optimizers)}: which "
                "backward belongs to which cannot be seen; weight the losses in the module"
            )
        if self._log is not None and not pl_module.automatic_optimization:
            found.append(f"TokenWeighted(log={self._log!r}) needs automatic optimization; log in the module")
        if updates_in_backward(trainer):
            found.append(
                "TokenWeighted scales the gradients of a whole window, but optimizer_in_backward=True uses each up at "
                "once; leave one of the two out"
            )
        if len(replica_devices(trainer)) > 1:
            found.append("TokenWeighted under dp_custom needs one device: it averages inside the step; use ddp_custom")
        refuse(trainer, found)
        self._window = _Window()
        self._device, self._is_in_parts = pl_module.device, cuts_batches(trainer)
        if self._is_in_parts:
            weigh_parts(trainer, self)

    @contextlib.contextmanager
    def counting(self, batch: Any) -> Iterator[Callable[[], Tensor]]:
        """Count the tokens of a part of a batch, such as a microbatch, whose step runs inside the context.

        Args:
            batch: The part.

        Returns:
            A function that returns the number, once the step has run.
        """
        if self._is_given:
            yield lambda: _as_number(self._counted(batch), self._device)
            return
        with LossObserver(in_trial=not torch.is_grad_enabled()) as observer:
            yield lambda: _as_number(observer.count(), self._device)

    @property
    def unit(self) -> Tensor:
        """The number of tokens that weighs 1, so that weights are near it; equal on all ranks."""
        assert self._unit is not None
        return self._unit

    @property
    def weighs_nothing(self) -> Tensor | None:
        """Whether the loss of the latest backward is a mean over no token, which is no number and weighs nothing."""
        return self._window.is_over_nothing

    def take_total(self, tokens: Tensor) -> None:
        """Take the number of tokens of a batch from the rank that has seen its losses."""
        self._given = tokens

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._is_in_parts:  # the strategy counts each part, and gives the total
            if self._unit is None:
                self._unit = _mean_over_ranks(trainer, _as_number(_num_entries(batch), pl_module.device))
            return
        if self._is_given:
            self._given = _as_number(self._counted(batch), pl_module.device)
        else:
            self._observe()

    @override
    def on_before_zero_grad(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        self._window = _Window()  # else one that was broken off would be counted to this one

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        observed = self._stop_observing()
        tokens = self._given if self._given is not None else _as_number(observed, pl_module.device)
        if self._unit is None:
            self._unit = _mean_over_ranks(trainer, tokens)
        if not self._is_in_parts:  # else gradients are weighted, and may be reduced over ranks
            weight = tokens / self._unit
            loss.register_hook(lambda gradient: gradient * weight.to(gradient.dtype))
        self._window.add(tokens)
        if not pl_module.automatic_optimization and self._given is None:
            self._observe()  # the step may go on to its next microstep

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if self._window.tokens is None:
            return
        assert self._unit is not None
        total = trainer.strategy.reduce(self._window.tokens.clone(), reduce_op="sum")
        is_automatic = pl_module.automatic_optimization
        divisor = trainer.accumulate_grad_batches if is_automatic else self._window.num_microsteps
        # The gradients are means over ranks, divided by the number of microsteps: undo both, and divide by all tokens.
        factor = self._unit * num_readers(trainer) * divisor / total
        factor = torch.where(total > 0, factor, 0.0)  # a window without any valid token has no gradient
        scale_gradients([p for group in optimizer.param_groups for p in group["params"]], factor)
        self._window.close(total)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._stop_observing()
        self._given = None
        if self._log is not None and isinstance(outputs, dict) and "loss" in outputs:
            self._window.add_loss(outputs["loss"] * trainer.accumulate_grad_batches)
            if (total := self._window.finished_total) is not None:
                loss = trainer.strategy.reduce(self._window.loss_sum.clone(), reduce_op="sum") / total
                pl_module.log(self._log, loss.float(), batch_size=1)
                self._window = _Window()

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop_observing()  # an `on_train_batch_start` that returns -1 ends the epoch without a step

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._stop_observing()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._window, self._given, self._unit = _Window(), None, None
        weigh_parts(trainer, None)

    @property
    def _is_given(self) -> bool:
        return self._count is not None or self._key is not None

    def _counted(self, batch: Any) -> Any:
        if self._count is not None:
            return self._count(batch)
        try:
            return (batch[self._key] != self._ignore_index).sum()
        except (KeyError, IndexError, TypeError):
            raise ConfigurationError(
                [f"TokenWeighted(key={self._key!r}): the batch is a {type(batch).__name__} without it; {_HINT}"]
            ) from None

    def _observe(self) -> None:
        self._stop_observing()
        self._observer = LossObserver()
        self._observer.__enter__()

    def _stop_observing(self) -> Tensor | None:
        observer, self._observer = self._observer, None
        if observer is None:
            return None
        _torch.modes.leave(observer)
        return observer.count()


class LossObserver(TorchFunctionMode):
    """Record over how many targets each cross-entropy averages, while it is entered.

    A function mode sees every call, also of ``from torch.nn.functional import cross_entropy``.

    Args:
        in_trial: Whether the step is tried without gradients; otherwise calls without are no losses, but metrics.
    """

    def __init__(self, *, in_trial: bool = False) -> None:
        super().__init__()
        self.counts: list[Tensor | None] = []
        self._in_trial = in_trial

    @_torch.modes.part_of_graphs_only
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (F.cross_entropy, F.nll_loss):
            logits = args[0] if args else kwargs["input"]
            if self._in_trial or (torch.is_grad_enabled() and logits.requires_grad):
                self.counts.append(_averaged_over(*args, **kwargs))
        return func(*args, **kwargs)

    def count(self) -> Tensor | None:
        """The number, if the calls agree on one."""
        first = self.counts[0] if self.counts else None
        if first is None or any(other is None or not torch.equal(first, other) for other in self.counts[1:]):
            return None
        return first


def _averaged_over(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """The divisor of a mean cross-entropy; ``None`` if it is no mean. The arguments are those of `cross_entropy`."""
    if reduction != "mean" or size_average is False or reduce is False:
        return None
    if target.is_floating_point():  # probabilities of classes: the mean is over the samples
        return target.new_tensor(target.numel() / input.shape[1 if input.ndim > 1 else 0])
    is_valid = target != ignore_index
    return is_valid.sum() if weight is None else weight.detach()[target[is_valid]].sum()


class _Window:
    """Token counts and losses of the microsteps since the last update."""

    def __init__(self) -> None:
        self.tokens: Tensor | None = None
        self.num_microsteps = 0
        self.finished_total: Tensor | None = None
        self.loss_sum = torch.zeros(())
        self._latest: Tensor | None = None

    @property
    def is_over_nothing(self) -> Tensor | None:
        return None if self._latest is None else self._latest == 0

    def add(self, tokens: Tensor) -> None:
        self.tokens = tokens if self.tokens is None else self.tokens + tokens
        self.num_microsteps += 1
        self._latest = tokens

    def add_loss(self, loss: Tensor) -> None:
        if self._latest is not None:  # a mean over no token is not a number, and weighs nothing
            weighted = torch.where(self._latest > 0, loss.detach().double() * self._latest, 0.0)
            self.loss_sum = weighted if self.loss_sum.device != weighted.device else self.loss_sum + weighted

    def close(self, total: Tensor) -> None:
        self.finished_total, self.tokens, self.num_microsteps = total, None, 0


def _mean_over_ranks(trainer: Trainer, number: Tensor) -> Tensor:
    """A number that is equal on all ranks, and at least 1. A collective."""
    mean = trainer.strategy.reduce(number.clone(), reduce_op="mean")
    return mean.clamp(min=1.0) if isinstance(mean, Tensor) else number.clamp(min=1.0)


def _num_entries(batch: Any) -> int:
    """About as many tokens as a batch has: the entries of its largest tensor of integers, such as labels."""
    leaves = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    return max((leaf.numel() for leaf in leaves if not leaf.is_floating_point()), default=1)


def _as_number(value: Any, device: torch.device) -> Tensor:
    """The number of tokens, in float64 where the device has it.

    Raises:
        ConfigurationError: If it is none.
    """
    dtype = torch.float32 if device.type == "mps" else torch.float64
    is_number = isinstance(value, int | float | Tensor) and not isinstance(value, bool)
    if not is_number or (isinstance(value, Tensor) and value.numel() != 1):
        what = "no mean cross-entropy, or several that average over different numbers" if value is None else repr(value)
        raise ConfigurationError(
            [f"TokenWeighted needs the number of valid tokens of a step, but found {what}; {_HINT}"]
        )
    number = torch.as_tensor(value, device=device).detach().to(dtype).reshape(())
    if number.device.type == "cpu" and not 0 <= float(number) < float("inf"):
        raise ConfigurationError([f"TokenWeighted: {float(number)} is no number of tokens; {_HINT}"])
    return number

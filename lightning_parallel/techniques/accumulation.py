"""Gradient accumulation under sharding: in which microsteps of a window gradients are reduced.

A window is the microsteps between two updates. DDP keeps whole gradients anyway, and reduces them once a window. Under
sharding an unreduced gradient is whole, so reducing late saves communication and costs memory.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule

from lightning_parallel import _torch
from lightning_parallel.errors import ConfigurationError
from lightning_parallel.ranks.memory import headroom, reset_peak_memory

MODES = ("auto", "every", "last")
_SHARE_OF_HEADROOM = 0.8
"""Part of the memory free at the peak of a step that may be used; longer batches and fragmentation need the rest."""


def accumulation_violations(accumulation_sync: str) -> list[str]:
    """Reasons why `accumulation_sync` is not a choice; empty if it is."""
    if accumulation_sync in MODES:
        return []
    return [f"accumulation_sync={accumulation_sync!r} is unknown; possible: {', '.join(MODES)}"]


class AccumulationWindow:
    """State of an accumulation window: whether this microstep holds its gradients back, or an earlier one did."""

    def __init__(self) -> None:
        self.is_held = False
        self.has_held = False
        self._has_held_before = False

    @property
    def is_first(self) -> bool:
        """Whether no earlier microstep of the window has held gradients back."""
        return not (self._has_held_before if self.is_held else self.has_held)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Inside this context, backward is not the last of its window, and holds gradients back."""
        self._has_held_before = self.has_held
        self.is_held = self.has_held = True
        try:
            yield
        finally:
            self.is_held = False

    def after_backward(self, *, keeps: bool = False) -> None:
        """Note the end of a backward; unless it was held or the caller `keeps` the window, the window is over."""
        self.has_held = self.has_held and (self.is_held or keeps)

    def take_rest(self) -> bool:
        """Whether anything was held and not reduced since; the window is empty afterwards."""
        has_rest, self.has_held = self.has_held, False
        return has_rest


class GradientReduction:
    """Reduction of gradients over an accumulation window, held back in all microsteps but the last.

    ``"last"`` reduces once a window. ``"every"`` reduces in each microstep; under HSDP, the averaging over copies still
    waits for the last microstep, because it only holds back a shard. ``"auto"`` runs the first window as ``"every"``,
    and then takes ``"last"`` if whole gradients fit into the memory that was free at the peak.

    Args:
        units: The sharded units.
        mode: One of `MODES`.
        device: This rank's device.
        ranks_on_device: Ranks that share the memory of `device`; on the host, all ranks of this machine.
        is_manual: Whether the module optimizes by itself, so that a backward may be the last of one window and in the
            middle of another optimizer's.
        is_hybrid: Whether gradient shards are averaged over copies, too (HSDP).
        shows_gradients: Whether a hook sees reduced gradients, which are then averaged over copies in each microstep.
        group: All ranks, to agree on ``"auto"`` in host memory.
        tell: Takes a sentence for the user.

    Example:
        >>> with reduction.held():  # in every microstep but the last
        ...     loss.backward()
    """

    def __init__(
        self,
        units: Sequence[nn.Module],
        *,
        mode: str,
        device: torch.device,
        ranks_on_device: int,
        is_manual: bool,
        is_hybrid: bool,
        shows_gradients: bool,
        group: ProcessGroup,
        tell: Callable[[str], None],
    ) -> None:
        self._units = [unit for unit in units if isinstance(unit, FSDPModule)]
        self._mode = mode
        self._device = device
        self._ranks_on_device = ranks_on_device
        self._is_manual = is_manual
        self._is_hybrid = is_hybrid
        self._averages_at_once = shows_gradients or not _torch.fsdp.CAN_REDUCE_UNUSED
        self._parameters = list(dict.fromkeys(p for unit in self._units for p in unit.parameters()))
        self._trainable: list[bool] | None = None
        self._group = group
        self._tell = tell
        self._has_measured = False
        self._window = AccumulationWindow()

    @property
    def holds_shards(self) -> bool:
        """Whether the microstep that runs now keeps whole gradients, so that its shards have no gradient yet."""
        return self.is_held and self._mode == "last"

    @property
    def is_held(self) -> bool:
        """Whether the microstep that runs now is not the last of its window."""
        return self._window.is_held

    @property
    def is_first(self) -> bool:
        """Whether no earlier microstep of the window has held gradients back."""
        return self._window.is_first

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Inside this context, backward is not the last of its window, and holds gradients back."""
        self._measure()
        self._hold()
        try:
            with self._window.held():
                yield
        finally:
            # A parameter that only the last microstep uses would bring a gradient of another dtype into the reduction.
            for unit in self._units if self._mode == "last" else ():
                _torch.fsdp.even_out_held_gradients(unit)
            self._set(reduce=True, all_reduce=True)

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Inside this context, a microstep is a window of its own, and reduces, whatever the one around it does."""
        window, self._window = self._window, AccumulationWindow()
        self._set(reduce=True, all_reduce=True)
        try:
            yield
        finally:
            self._window = window
            if window.is_held:
                self._hold()

    def before_backward(self) -> None:
        """Check, before each backward, that the same parameters train as in the window's microsteps so far.

        Raises:
            ConfigurationError: If gradient shards wait to be averaged over copies (HSDP), and others train now.
        """
        # Torch keeps the waiting shards of a unit in one flat buffer, and loses them if other parameters train.
        waits = self._is_hybrid and _torch.fsdp.CAN_REDUCE_UNUSED
        if not waits or self._is_manual or self._mode == "last":
            return
        trainable = [parameter.requires_grad for parameter in self._parameters]
        before, self._trainable = self._trainable, trainable if self.is_held else None
        if before is not None and before != trainable:
            raise ConfigurationError([_CHANGED])

    def after_backward(self) -> None:
        """Note the end of a backward; if it was not held, its window is over."""
        self._window.after_backward(keeps=self._is_manual)

    def reduce_rest(self) -> bool:
        """Reduce gradients that were held and never reduced, as happens in a user's own loop.

        A collective, if there are any.

        Returns:
            Whether there were any.

        Raises:
            ConfigurationError: If there are some that nothing held back.
        """
        has_rest = self._window.take_rest()
        if self._is_manual and not has_rest and any(map(_torch.fsdp.holds_gradients, self._units)):
            raise ConfigurationError([_ASSIGNED])
        if has_rest and self._units:
            self._reduce_held()
        return has_rest

    def drop(self, parameters: Collection[Tensor]) -> None:
        """Forget held gradients of `parameters`, such as those of a window that was broken off."""
        if self._window.has_held:
            for unit in self._units:
                _torch.fsdp.drop_held_gradients(unit, parameters)

    def reduce_missed(self) -> None:
        """Reduce gradients that a backward left unreduced though nothing held them back. A collective.

        A unit notices the end of its backward by hooks on the tensors that its forward returned. If forward returns an
        object that hides them, such as a `torch.distributions.Normal`, there are no hooks.
        """
        if self._units and not self._window.has_held:
            self._reduce_held()

    def hold_microbatches(self) -> None:
        """Hold back the gradients of all backwards until `reduce_microbatches`: they are parts of one."""
        for unit in self._units:
            unit.set_requires_gradient_sync(not _torch.fsdp.can_hold_gradients(unit), recurse=False)

    def reduce_microbatches(self) -> None:
        """Reduce the gradients of a step's microbatches, unless this microstep holds its own. A collective then."""
        for unit in self._units:
            _torch.fsdp.even_out_held_gradients(unit)
            unit.set_requires_gradient_sync(True, recurse=False)
        if self._units and not self.holds_shards:
            self._reduce_held()

    def _reduce_held(self) -> None:
        # Ranks may differ in what they used, but all of them take part in reducing what one of them holds.
        owners = torch.tensor([_torch.fsdp.holds_gradients(unit) for unit in self._units], dtype=torch.uint8)
        dist.all_reduce(owners, op=dist.ReduceOp.MAX, group=self._group)
        for unit, is_holding in zip(self._units, owners.tolist(), strict=True):
            if is_holding:
                _torch.fsdp.reduce_held_gradients(unit)

    def after_update(self) -> None:
        """End the window. With ``"auto"``, the first one decides between the other modes, in a collective."""
        if self._mode == "auto" and self._has_measured:
            self._decide()

    def _hold(self) -> None:
        self._set(reduce=self._mode != "last", all_reduce=self._averages_at_once)

    def _set(self, *, reduce: bool, all_reduce: bool) -> None:
        for unit in self._units:
            unit.set_requires_gradient_sync(reduce or not _torch.fsdp.can_hold_gradients(unit), recurse=False)
            # The all-reduce over copies (HSDP) follows the reduction to shards, and needs no setting where that is off.
            if reduce:
                unit.set_requires_all_reduce(all_reduce, recurse=False)

    def _measure(self) -> None:
        if self._mode == "auto" and self._units and not self._has_measured:
            self._has_measured = True
            reset_peak_memory(self._device)

    def _decide(self) -> None:
        needed = sum(_torch.fsdp.whole_gradient_bytes(unit) for unit in self._units)
        free = headroom(self._device) // self._ranks_on_device
        # The rank with the least room decides for all: they reduce together.
        room = torch.tensor([free], dtype=torch.int64)
        dist.all_reduce(room, op=dist.ReduceOp.MIN, group=self._group)
        fits = needed <= _SHARE_OF_HEADROOM * int(room)
        self._mode = "last" if fits else "every"
        self._tell(
            f"accumulation_sync=auto: gradients are reduced in {'the last' if fits else 'every'} microstep; unreduced "
            f"they take {needed / 2**30:.2f} GiB, and {int(room) / 2**30:.2f} GiB were free at the peak"
        )


class ZeroGrad:
    """Extension of an optimizer's `zero_grad` that also drops held gradients, which it cannot see; `detach` ends it.

    Args:
        optimizer: The optimizer, or Lightning's form of it.
        drop: Called with the optimizer's parameters.
    """

    def __init__(self, optimizer: Any, drop: Callable[[Collection[Tensor]], None]) -> None:
        self._optimizer = optimizer
        plain = optimizer.zero_grad

        @functools.wraps(plain)
        def zero_grad(*args: Any, **kwargs: Any) -> None:
            plain(*args, **kwargs)
            drop({parameter for group in optimizer.param_groups for parameter in group["params"]})

        optimizer.zero_grad = zero_grad

    def detach(self) -> None:
        """Give the optimizer its own `zero_grad` back."""
        vars(self._optimizer).pop("zero_grad", None)


_ASSIGNED = (
    "the step updates parameters by gradients that nobody has reduced over ranks: it has assigned them to p.grad, as "
    "from torch.autograd.grad, or goes backward by loss.backward(). Call self.manual_backward(loss) instead; or assign "
    "the mean over ranks, self.all_gather(gradient).mean(0), under ddp_custom"
)
_CHANGED = (
    "parameters were frozen or thawed between two microsteps of an accumulation window, where gradient shards of the "
    "first wait to be averaged over the copies (HSDP), and torch would drop them; do it between windows, or give "
    "accumulation_sync='last'"
)

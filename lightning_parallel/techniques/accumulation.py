"""When the gradients of sharded units are reduced within an accumulation window.

A window is the microsteps between two updates. DDP keeps whole gradients anyway, and reduces them once a window. Under
sharding a gradient that is not reduced yet is whole, so reducing late trades memory for communication.
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
"""Of what is free at the peak of a step, so that a longer batch and fragmentation have room."""


def accumulation_violations(accumulation_sync: str) -> list[str]:
    """Reasons why `accumulation_sync` is not a choice; empty if it is."""
    if accumulation_sync in MODES:
        return []
    return [f"accumulation_sync={accumulation_sync!r} is unknown; possible: {', '.join(MODES)}"]


class AccumulationWindow:
    """The microsteps between two updates: whether the one that runs now is held back, and whether any was."""

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
        """Backward in here is not the last of its window."""
        self._has_held_before = self.has_held
        self.is_held = self.has_held = True
        try:
            yield
        finally:
            self.is_held = False

    def after_backward(self, *, keeps: bool = False) -> None:
        """A backward has ended; unless it was held or the caller `keeps` the window, nothing of it is left."""
        self.has_held = self.has_held and (self.is_held or keeps)

    def take_rest(self) -> bool:
        """Whether anything was held and not reduced since; from now on, nothing was."""
        has_rest, self.has_held = self.has_held, False
        return has_rest


class GradientReduction:
    """Holds back the reduction of gradients in all microsteps of a window but the last.

    ``"last"`` reduces once a window. ``"every"`` reduces in each microstep; where copies are averaged too (HSDP), that
    part waits for the last one, because it holds back no more than a shard. ``"auto"`` runs the first window as
    ``"every"``, and takes ``"last"`` from then on if whole gradients fit what was free at the peak.

    Args:
        units: The sharded units.
        mode: One of `MODES`.
        device: This rank's device.
        ranks_on_device: How many ranks share the memory of `device`: on the host, all of this machine.
        is_manual: Whether the module optimizes by itself, so that a backward may be the last of one window and in the
            middle of another optimizer's.
        is_hybrid: Whether gradient shards are averaged over copies, too (HSDP).
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
        group: ProcessGroup,
        tell: Callable[[str], None],
    ) -> None:
        self._units = [unit for unit in units if isinstance(unit, FSDPModule)]
        self._mode = mode
        self._device = device
        self._ranks_on_device = ranks_on_device
        self._is_manual = is_manual
        self._is_hybrid = is_hybrid
        self._parameters = list(dict.fromkeys(p for unit in self._units for p in unit.parameters()))
        self._trainable: list[bool] | None = None
        self._group = group
        self._tell = tell
        self._has_measured = False
        self._window = AccumulationWindow()

    @property
    def holds_shards(self) -> bool:
        """Whether the microstep that runs now keeps whole gradients, so that its reduction says nothing yet."""
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
        """Backward in here is not the last of its window."""
        self._measure()
        self._set(reduce=self._mode != "last", all_reduce=not _torch.fsdp.CAN_REDUCE_UNUSED)
        try:
            with self._window.held():
                yield
        finally:
            for unit in self._units if self._mode == "last" else ():
                _torch.fsdp.even_out_held_gradients(unit)
            self._set(reduce=True, all_reduce=True)

    def before_backward(self) -> None:
        """Call it before each backward.

        Raises:
            ConfigurationError: If gradients of the window wait for copies to be averaged, and others train now.
        """
        waits = self._is_hybrid and _torch.fsdp.CAN_REDUCE_UNUSED
        if not waits or self._is_manual or self._mode == "last":
            return
        trainable = [parameter.requires_grad for parameter in self._parameters]
        before, self._trainable = self._trainable, trainable if self.is_held else None
        if before is not None and before != trainable:
            raise ConfigurationError([_CHANGED])

    def after_backward(self) -> None:
        """A backward has ended; if it was not held, nothing is left over of its window."""
        self._window.after_backward(keeps=self._is_manual)

    def reduce_rest(self) -> bool:
        """Reduce what was held and never reduced, as in a user's own loop. A collective, if there is any.

        Returns:
            Whether there was any.
        """
        has_rest = self._window.take_rest()
        if has_rest and self._units:
            self._reduce_held()
        return has_rest

    def drop(self, parameters: Collection[Tensor]) -> None:
        """Forget gradients of `parameters` that wait: those of a window that was broken off."""
        if self._window.has_held:
            for unit in self._units:
                _torch.fsdp.drop_held_gradients(unit, parameters)

    def reduce_missed(self) -> None:
        """Reduce what a backward has left though nothing in its window held it back. A collective.

        A unit notices the end of its backward by hooks on the tensors that its forward returned. One that returns an
        object which hides them, such as a `torch.distributions.Normal`, has none.
        """
        if self._units and not self._window.has_held:
            self._reduce_held()

    def hold_microbatches(self) -> None:
        """All backwards until `reduce_microbatches` are parts of one: none of them reduces."""
        for unit in self._units:
            unit.set_requires_gradient_sync(not _torch.fsdp.can_hold_gradients(unit), recurse=False)

    def reduce_microbatches(self) -> None:
        """Reduce what the microbatches of a step left, unless this microstep is one that holds. A collective then."""
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
        """The window has ended. With ``"auto"``, decide by what the first one took. A collective then."""
        if self._mode == "auto" and self._has_measured:
            self._decide()

    def _set(self, *, reduce: bool, all_reduce: bool) -> None:
        for unit in self._units:
            unit.set_requires_gradient_sync(reduce or not _torch.fsdp.can_hold_gradients(unit), recurse=False)
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
    """Lets `zero_grad` of an optimizer drop what waits beside the gradients that it knows of; `detach` ends it.

    Args:
        optimizer: The optimizer, or Lightning's form of it.
        drop: Takes its parameters.
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


_CHANGED = (
    "parameters were frozen or thawed between two microsteps of an accumulation window, where gradient shards of the "
    "first wait to be averaged over the copies (HSDP), and torch would drop them; do it between windows, or give "
    "accumulation_sync='last'"
)

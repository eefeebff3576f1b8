"""The order in which ranks call sharded units: each call gathers parameters from all ranks, so all call the same ones.

Where a rank leaves a layer out that others call (LayerDrop; Fan et al. 2020), a rank that waits for the parts of one
layer is sent those of another. Equal layers have equal parts: without a look, the sum would be trained on.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule

from lightning_parallel import _torch
from lightning_parallel.errors import RanksDifferError

_NUM_VOTES = 8
_BYTE = 0xFF


class Calls(NamedTuple):
    """The units that a rank has called in a step so far.

    Args:
        step: The number of steps begun, and of looks, before.
        units: The numbers of the units whose forward is over, in order.
        is_backward: Whether backward has begun, so that no further forward of the step follows.
        has_returned: Whether the step itself is over, with all of its calls.
        entered: The numbers of those in whose forward it is, the outer ones too.
    """

    step: int
    units: list[int]
    is_backward: bool
    has_returned: bool = False
    entered: Sequence[int] = ()

    def contradicts(self, other: Calls) -> bool:
        """Whether no order of calls leads to both, however slow one of the ranks is."""
        if self.step != other.step:
            return False
        shared = min(len(self.units), len(other.units))
        if self.units[:shared] != other.units[:shared]:
            return True
        more, less = (self, other) if len(self.units) > shared else (other, self)
        if less.is_backward and len(more.units) > len(less.units):
            return True
        if any(one.has_returned and two.waits_beyond(one) for one, two in ((self, other), (other, self))):
            return True
        is_nested = set(self.entered) <= set(other.entered) or set(other.entered) <= set(self.entered)
        return len(self.units) == len(other.units) and not is_nested

    def waits_beyond(self, other: Calls) -> list[int]:
        """The units in which this rank is, and the other one is not, nor has called them since."""
        known = {*other.entered, *other.units[len(self.units) :]}
        return [unit for unit in self.entered if unit not in known]

    def beside(self, other: Calls) -> list[int]:
        """The units in order, with that in which this rank waits, if the other one has not called it."""
        return [*self.units, *self.waits_beyond(other)[:1]]


class UnitOrder:
    """The units that this rank has called since the last look.

    Args:
        units: Path of a sharded unit -> the unit, in an order that all ranks share.
        group: The ranks that share the parameters, with a backend for host memory.
    """

    def __init__(self, units: Mapping[str, nn.Module], group: ProcessGroup) -> None:
        is_shared = group.size() > 1
        self.units = {path: unit for path, unit in units.items() if is_shared and isinstance(unit, FSDPModule)}
        """Those that are shared."""
        self.first_rank = dist.get_process_group_ranks(group)[0]
        """The first of the ranks that share the parameters."""
        self._group = group
        self._called: list[int] = []
        self._num_before = self._number = 0
        self._is_backward = self._has_returned = self._has_microbatches = False

    def begin(self) -> None:
        """Forget what evaluation has called, of which torch keeps a list until the next backward."""
        self._num_before, self._is_backward = len(self._now()), False
        self._begin_step()

    @property
    def calls(self) -> Calls:
        """The calls since the last look, for a thread that watches them."""
        is_over = self._is_backward or self._has_returned
        entered = [] if is_over else _torch.unit_parameters.entered_units(list(self.units.values()))
        called = [*self._called, *self._now()[self._num_before :]]
        # Behind a microbatch, others follow; and until its backward is over, torch's list is not that of the next one.
        is_last = self._is_backward and not self._has_microbatches
        return Calls(self._number, called, is_last, self._has_returned, entered)

    def note(self) -> None:
        """Note what has been called by now; call it between forward and backward."""
        now = self._now()
        self._called += now[self._num_before :] if len(now) >= self._num_before else now
        self._num_before, self._is_backward = len(now), True

    @contextlib.contextmanager
    def step(self, *, goes_backward: bool, has_microbatches: bool = False) -> Iterator[None]:
        """Open it around each run of a step.

        Args:
            goes_backward: Whether its calls are not all forward, after which nobody knows when the last one is over.
            has_microbatches: Whether the backward of one is followed by the forward of another.
        """
        self._begin_step()
        self._has_microbatches = has_microbatches
        yield
        self._has_returned = not goes_backward

    def _begin_step(self) -> None:
        self._number, self._has_returned = self._number + 1, False

    def votes(self) -> list[int]:
        """Numbers of which the largest over all ranks shows whether all have the same: each byte, and what it lacks."""
        digest = zlib.crc32(repr(self._called).encode()).to_bytes(_NUM_VOTES // 2, "big")
        return [*digest, *(_BYTE - byte for byte in digest)]

    def check(self, most: Sequence[int]) -> None:
        """Refuse a step in which ranks have called different units. A collective of all ranks, if they have.

        Args:
            most: The largest of each of the `votes`, over all ranks.

        Raises:
            RanksDifferError: If they have.
        """
        own, self._called = self._called, []
        self._num_before, self._number, self._is_backward = 0, self._number + 1, False
        half = len(most) // 2
        if all(byte == _BYTE - other for byte, other in zip(most[:half], most[half:], strict=True)):
            return
        self._refuse(own)

    def check_now(self) -> None:
        """Refuse a step in which ranks have called different units so far. A collective of all ranks.

        Raises:
            RanksDifferError: If they have.
        """
        if self.units:
            self._refuse(self.calls.units)

    def _refuse(self, own: list[int]) -> None:
        found = [own] * self._group.size()
        dist.all_gather_object(found, own, group=self._group)
        if any(order != found[0] for order in found):
            raise RanksDifferError(in_words(list(self.units), found))

    def _now(self) -> list[int]:
        return _torch.unit_parameters.forward_order(list(self.units.values()))


def in_words(paths: Sequence[str], orders: Sequence[Sequence[int]]) -> str:
    """The message for ranks that have called different units.

    Args:
        paths: The paths of the units.
        orders: The numbers of the units that each rank has called, in order.
    """
    other = next(rank for rank, order in enumerate(orders) if order != orders[0])
    pairs = zip(orders[0], orders[other], strict=False)
    shared = next((place for place, (one, two) in enumerate(pairs) if one != two), None)
    place = min(len(orders[0]), len(orders[other])) if shared is None else shared
    calls = [
        (paths[order[place]] or "the module") if place < len(order) else "none" for order in (orders[0], orders[other])
    ]
    return (
        f"ranks have called different layers in this step: call {place + 1} of a sharded unit was {calls[0]} on rank 0 "
        f"and {calls[1]} on rank {other} of those that share parameters. Each call gathers parameters from all of "
        "them, so that one has computed with those of another layer. Decide alike on all ranks which layers run, such "
        "as by a generator seeded with self.global_step; or call all of them, and drop a result; or give layers=[], "
        "with which the module is one unit, or ddp_custom:find_unused_parameters=true, under which each rank has all "
        "parameters"
    )

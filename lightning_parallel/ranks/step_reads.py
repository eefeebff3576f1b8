"""Parameters with which user code computes outside of the layers that own them: whole values, with a backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from lightning_parallel.errors import line_of_user
from lightning_parallel.ranks.collectives import paired
from lightning_parallel.ranks.dtensors import whole_on_device
from lightning_parallel.ranks.mesh import AXES


@dataclass
class _Steps:
    depth: int = 0
    number: int = 0
    is_updating: bool = False


_steps = _Steps()
"""The steps that run in this process, one inside of the other, and how many have begun."""


@contextlib.contextmanager
def step_noted() -> Iterator[None]:
    """Inside this context, a step of a module runs."""
    _steps.number += not _steps.depth
    _steps.depth += 1
    try:
        yield
    finally:
        _steps.depth -= 1


@contextlib.contextmanager
def update_noted(closure: Callable[[], Any]) -> Iterator[Callable[[], Any]]:
    """Inside this context, an optimizer of the user's computes, but for what it calls for gradients.

    Args:
        closure: What it calls for them, with clipping and hooks.

    Returns:
        `closure`, outside of the context.
    """

    def outside() -> Any:
        _steps.is_updating = False
        try:
            return closure()
        finally:
            _steps.is_updating = True

    _steps.is_updating = True
    try:
        yield outside
    finally:
        _steps.is_updating = False


def is_in_step() -> bool:
    """Whether a step of a module runs, or the code of an optimizer of the user's."""
    return _steps.depth > 0 or _steps.is_updating


def is_updating() -> bool:
    """Whether the code of an optimizer of the user's runs."""
    return _steps.is_updating


class StepReads:
    """Makes sharded and split parameters whole where user code computes with them outside of their layers.

    A penalty over ``parameters()`` gives every rank the same value, and ``F.linear(h, self.embedding.weight)`` one of
    its own samples; either way a gradient is the mean over the ranks that read different samples.

    Ranks wait for each other at each such place. One that is new in a step and its hooks, or was left out in the step
    before, is first announced to the other ranks, so that code that only one rank runs is refused in words.

    Args:
        meet: Waits until all ranks have come, with the mesh and placements of a tensor, and its form in words.
        tell: Takes a line for the user.

    Example:
        >>> reads = StepReads(reader.meet, print)
        >>> penalty = sum(reads.whole(p).abs().sum() for p in module.parameters())
    """

    def __init__(
        self, meet: Callable[[DeviceMesh, Sequence[Placement], str], None], tell: Callable[[str], object]
    ) -> None:
        self._meet, self._tell = meet, tell
        self._number = 0
        self._is_told = False
        self._known: set[str] = set()
        self._read: set[str] = set()

    def whole(self, tensor: DTensor) -> Tensor:
        """The whole value `[...]` of `tensor`, on the device of its mesh. A collective.

        Raises:
            ConfigurationError: If other ranks do not come to the same line.
        """
        self.announce(tensor.device_mesh, tensor.placements, f"{tuple(tensor.shape)} {tensor.dtype}")
        if _steps.is_updating and tensor.ndim and not self._is_told:
            self._is_told = True
            self._tell(_IN_UPDATES.format(line_of_user()))
        # Gradients of sums that are not complete yet are those of each summand.
        placements = [Replicate() if placement.is_partial() else placement for placement in tensor.placements]
        part = partial(_part_of_mean, tensor.device_mesh, placements, tensor.device)
        return paired(tensor, whole_on_device, part)

    def announce(self, mesh: DeviceMesh, placements: Sequence[Placement], form: str) -> None:
        """Wait until all ranks have come to an operation in which they wait for each other, unless it is known.

        Args:
            mesh: The mesh of a tensor of which each rank has a part.
            placements: The parts.
            form: Its shape and dtype.

        Raises:
            ConfigurationError: If other ranks do not come to the same line.
        """
        if self._number != _steps.number:
            self._number = _steps.number
            self._known, self._read = self._read, set()
        self._read.add(line := line_of_user())
        if line not in self._known:  # each time: another rank may come to this line less often
            self._meet(mesh, placements, form)


def _part_of_mean(mesh: DeviceMesh, placements: Sequence[Placement], device: torch.device, gradient: Tensor) -> Tensor:
    """This rank's part of the mean gradient over the ranks that read different samples."""
    mean = gradient.contiguous().clone()
    for axis, name in enumerate(mesh.mesh_dim_names or ()):
        if name != AXES["tensor"] and mesh.size(axis) > 1:
            group = mesh.get_group(axis)
            dist.all_reduce(mean, group=group)
            mean /= group.size()
    # Without a source rank, every rank takes its part from its own copy, without communication.
    return distribute_tensor(mean, mesh, placements, src_data_rank=None).to(device)  # offloaded parts are on the host


_IN_UPDATES = (
    "the optimizer computes at {} with values of parameters of which each rank has a part: ranks gather them there in "
    "each update, one tensor at a time. zero1_custom keeps parameters whole"
)

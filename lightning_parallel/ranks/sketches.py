"""Sketches of tensors: a few random sums of each, by which sharded ones are compared without being gathered.

The sketch of a tensor is the sum of its elements, each multiplied by a normal number of its row, one of its column, and
so on, `NUM` times with other numbers. Tensors that differ have different sketches, as in Freivalds' check of products
of matrices (1977), and the mean square of a sketch estimates that of the norm. Sketches are linear: that of a sharded
tensor is the sum of those of its shards.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Replicate

from lightning_parallel.ranks.dtensors import local_of, sharded_like

NUM = 8
"""Sums of a tensor. That all of them are a tenth of what is to be expected happens once in about a million matrices."""


class Sketches:
    """Sketches of tensors, with the same random numbers on all ranks.

    Args:
        device: This rank's device, whose memory its process groups send.

    Example:
        >>> sketches = Sketches(device)
        >>> sketches.of({"weight": shards})["weight"]  # the same on all ranks
        tensor([...], dtype=torch.float64)
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._numbers: dict[tuple[int, int], Tensor] = {}

    @torch.no_grad()
    def of(self, tensors: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The sketches of tensors, each `[NUM]` in fp64 in host memory. A collective of those that share shards.

        Args:
            tensors: Name -> plain tensor, or shards. Whatever a rank lacks is zero.
            like: Name -> plain tensor, or shards, of the same names on all ranks. They give the order, and the axes
                along which ranks have parts. A tensor that has parts along others has a sketch of NaN.
        """
        found = {name: self._of_part(tensors.get(name), kind) for name, kind in like.items()}
        sharded = sorted((name for name, kind in like.items() if _axes(kind)), key=lambda name: _key(like[name]))
        for _, names in groupby(sharded, key=lambda name: _key(like[name])):
            self._add_up(found, list(names), like)
        return found

    def averaged(self, sketches: Mapping[str, Tensor], group: ProcessGroup | None) -> dict[str, Tensor]:
        """The mean of the sketches of several ranks, in one message. A collective.

        Args:
            sketches: Of the same names on all ranks.
            group: The ranks; ``None`` for one process.
        """
        if group is None or group.size() == 1 or not sketches:
            return dict(sketches)
        total = self._sum(list(sketches.values()), [group])
        return dict(zip(sketches, total / group.size(), strict=True))

    def _of_part(self, tensor: Tensor | None, like: Any) -> Tensor:
        """This rank's summand of the sketch of `tensor`."""
        if tensor is None:
            return torch.zeros(NUM, dtype=torch.float64)
        if not set(_axes(tensor)) <= set(_axes(like)):
            return torch.full((NUM,), math.nan, dtype=torch.float64)
        local = local_of(tensor).detach()
        if local.is_complex():
            real, imaginary = torch.view_as_real(local).unbind(-1)
            found = self._product(real, tensor) + math.pi * self._product(imaginary, tensor)
        else:
            found = self._product(local, tensor)
        whole_along = set(_axes(like)) - set(_axes(tensor))
        return found / math.prod(int(like.device_mesh.size(axis)) for axis in whole_along)

    def _product(self, local: Tensor, tensor: Tensor) -> Tensor:
        """The sums over all dimensions of `local`, this rank's part of `tensor`, the last one first."""
        if local.numel() == 0:
            return torch.zeros(NUM, dtype=torch.float64)
        local = local.to(torch.promote_types(local.dtype, torch.float32))
        dims = [dim for dim in range(tensor.dim()) if tensor.shape[dim] != 1] or [-1]
        sums = local.reshape([local.shape[dim] for dim in dims] if dims != [-1] else [1])
        sums = sums @ self._part(tensor, dims[-1]).to(sums)
        for dim in reversed(dims[:-1]):
            sums = (sums.double() * self._part(tensor, dim).to(sums.device)).sum(dim=-2)
        return sums.double().cpu()

    def _part(self, tensor: Tensor, dim: int) -> Tensor:
        """The random numbers `[length, NUM]` of this rank's part of a dimension; of -1, those of a single number."""
        whole = self._vectors(dim, 1 if dim < 0 else tensor.shape[dim])
        if not isinstance(tensor, DTensor):
            return whole
        placements: list[Any] = [each if _is_along(each, dim) else Replicate() for each in tensor.placements]
        if all(each.is_replicate() for each in placements):
            return whole
        shape = [1] * tensor.dim() + [NUM]
        shape[dim] = tensor.shape[dim]
        return local_of(sharded_like(whole.reshape(shape), tensor, placements)).reshape(-1, NUM)

    def _vectors(self, dim: int, length: int) -> Tensor:
        key = (dim, length)
        if key not in self._numbers:
            generator = torch.Generator().manual_seed(dim + 1)
            self._numbers[key] = torch.randn(length, NUM, generator=generator, dtype=torch.float64)
        return self._numbers[key]

    def _add_up(self, found: dict[str, Tensor], names: list[str], like: Mapping[str, Any]) -> None:
        """Replace the summands of shards of one mesh by their sums. A collective."""
        mesh, axes = like[names[0]].device_mesh, _axes(like[names[0]])
        total = self._sum([found[name] for name in names], [mesh.get_group(axis) for axis in axes])
        found.update(zip(names, total, strict=True))

    def _sum(self, sketches: Sequence[Tensor], groups: Sequence[ProcessGroup]) -> Tensor:
        total = torch.stack(list(sketches)).to(self._device)
        for group in groups:
            dist.all_reduce(total, group=group)
        return total.cpu()


def unlike(
    ours: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float, negligible: float
) -> list[str]:
    """Names of tensors whose sketches differ.

    Args:
        ours: Name -> sketch.
        expected: The same, as it should be; may have more names.
        tolerance: The share of a norm that is rounding.
        negligible: The share of the norm of all of `expected` that is noise in each.
    """
    norms = {name: _norm(sketch) for name, sketch in expected.items()}
    least = negligible * math.hypot(*norms.values())
    apart = {name: _norm(sketch - expected[name]) for name, sketch in ours.items()}
    # Not `>`, which no NaN is.
    return [name for name, distance in apart.items() if not distance <= tolerance * (norms[name] + least)]


def _norm(sketch: Tensor) -> float:
    """An estimate of the norm of what has this sketch."""
    return float(sketch.square().mean().sqrt())


def _axes(tensor: Tensor) -> tuple[int, ...]:
    """The axes of the mesh along which ranks have parts of `tensor`, or summands."""
    if not isinstance(tensor, DTensor):
        return ()
    return tuple(axis for axis, placement in enumerate(tensor.placements) if not placement.is_replicate())


def _is_along(placement: Any, dim: int) -> bool:
    """Whether ranks have parts of this dimension, in order or strided."""
    return not placement.is_replicate() and not placement.is_partial() and placement.dim == dim


def _key(tensor: Any) -> str:
    """Common traits of the tensors of one message: the mesh, and the axes along which ranks have parts."""
    return f"{tensor.device_mesh} {_axes(tensor)}"

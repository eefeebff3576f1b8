"""Buffers that each rank computes from its own samples, of which one rank's are kept."""

from __future__ import annotations

import math

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_parallel.module.differences import first_of
from lightning_parallel.module.placeholders import is_placeholder
from lightning_parallel.ranks.objects import of_all_ranks

_LOOKS = (1, 4)
"""Steps behind which ranks are compared: some buffers are written first when others are full."""
_LARGEST = 1 << 28
"""Elements of a buffer that is looked at; larger ones are tables and masks, of which a sum takes its time."""
_TOLERANCE = 1e-6
"""The relative difference of sums that rounding does not explain."""
_SMALL = 4096
_PIECES = 64
"""Elements from which on a buffer is summed in pieces, and how many: of a queue of 64000 rows, a step writes a few,
which no sum over all of it would show. Each rank hears of those of all, so there cannot be many."""


class RankBuffers:
    """Says once which buffers ranks have computed differently, where one process computes them from all samples.

    Args:
        module: The module.

    Example:
        >>> buffers = RankBuffers(module)
        >>> buffers.begin_step()  # before each one
    """

    def __init__(self, module: nn.Module) -> None:
        self._module, self._num_steps, self._has_told = module, 0, False

    def begin_step(self) -> None:
        """Compare the buffers behind the first step, and behind a later one. A collective then."""
        has_any = next(self._module.buffers(), None) is not None  # on all ranks, also where they have another stage
        if has_any and self._num_steps in _LOOKS and not self._has_told:
            names = _differing(of_all_ranks(_sums(self._module)))
            if names:
                self._tell(names)
        self._num_steps += 1

    def _tell(self, names: list[str]) -> None:
        self._has_told = True
        norms = [name for name in names if name.rpartition(".")[-1] in ("running_mean", "running_var")]
        others = [name for name in names if name not in norms]
        advice = [*([_OTHERS] if others else []), *([_NORMS] if norms else [])]
        rank_zero_info(_WORDS.format(names=first_of([*others, *norms]), advice="; ".join(advice)))


@torch.no_grad()
def _sums(module: nn.Module) -> dict[str, list[tuple[float, float]]]:
    """Of each buffer that this rank has, for each piece, the sums of its elements and of their absolute values."""
    named = [(name, buffer) for name, buffer in module.named_buffers() if _is_plain(buffer)]
    sums = [_sums_of(buffer.flatten()).to("cpu") for _, buffer in named]
    return {name: [(each[0], each[1]) for each in own.tolist()] for (name, _), own in zip(named, sums, strict=True)}


def _sums_of(elements: Tensor) -> Tensor:
    """The two sums of each piece, of shape ``[pieces, 2]``."""
    pieces = elements.tensor_split(_PIECES) if elements.numel() > _SMALL else (elements,)
    return torch.stack([torch.stack([piece.sum(), piece.abs().sum()]) for piece in map(Tensor.double, pieces)])


def _is_plain(buffer: Tensor) -> bool:
    if buffer.is_meta or isinstance(buffer, DTensor) or is_placeholder(buffer):
        return False
    return not buffer.is_complex() and buffer.layout == torch.strided and buffer.numel() <= _LARGEST


def _differing(of_ranks: list[dict[str, list[tuple[float, float]]]]) -> list[str]:
    """Names of buffers that are not the same on all ranks that have them."""
    first: dict[str, list[tuple[float, float]]] = {}
    for own in reversed(of_ranks):
        first |= own
    return [name for name, sums in first.items() if any(_are_apart(own.get(name, sums), sums) for own in of_ranks)]


def _are_apart(sums: list[tuple[float, float]], others: list[tuple[float, float]]) -> bool:
    return len(sums) != len(others) or any(map(_is_apart, sums, others))


def _is_apart(value: tuple[float, float], other: tuple[float, float]) -> bool:
    distance = max(abs(value[0] - other[0]), abs(value[1] - other[1]))
    return math.isfinite(distance) and distance > _TOLERANCE * max(value[1], other[1])


_WORDS = (
    "behind the first steps, ranks have other values of {names}, since each computes them from its own samples or "
    "random numbers. Every step begins with those of rank 0, as under torch's DistributedDataParallel, so what other "
    "ranks add to them is lost. {advice}"
)
_NORMS = "Trainer(sync_batchnorm=True) takes statistics of the samples of all ranks, on CUDA devices"
_OTHERS = "Average what a step writes into a buffer over the ranks, as in value = self.all_gather(value).mean(0)"

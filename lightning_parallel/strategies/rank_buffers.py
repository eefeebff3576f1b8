"""Buffers that each rank computes from its own samples, of which one rank's are kept."""

from __future__ import annotations

import math

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_parallel.module.differences import first_of
from lightning_parallel.ranks.objects import of_all_ranks

_LOOKS = (1, 4)
"""Steps behind which ranks are compared: some buffers are written first when others are full."""
_LARGEST = 1 << 24
"""Elements of a buffer that is looked at; larger ones are tables and masks, of which a sum would take much memory."""
_TOLERANCE = 1e-5
"""The relative difference of sums that rounding does not explain."""


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
def _sums(module: nn.Module) -> dict[str, tuple[float, float]]:
    """Of each buffer that this rank has, the sums of its elements and of their absolute values."""
    named = [(name, buffer) for name, buffer in module.named_buffers() if _is_plain(buffer)]
    values = [buffer.double() for _, buffer in named]
    sums = [torch.stack([value.sum(), value.abs().sum()]).to("cpu") for value in values]
    return {name: (float(each[0]), float(each[1])) for (name, _), each in zip(named, sums, strict=True)}


def _is_plain(buffer: Tensor) -> bool:
    if buffer.is_meta or buffer.is_complex() or isinstance(buffer, DTensor) or buffer.layout != torch.strided:
        return False
    return buffer.numel() <= _LARGEST


def _differing(of_ranks: list[dict[str, tuple[float, float]]]) -> list[str]:
    """Names of buffers that are not the same on all ranks that have them."""
    first: dict[str, tuple[float, float]] = {}
    for own in reversed(of_ranks):
        first |= own
    return [name for name, value in first.items() if any(_is_apart(own.get(name, value), value) for own in of_ranks)]


def _is_apart(value: tuple[float, float], other: tuple[float, float]) -> bool:
    distance = max(abs(value[0] - other[0]), abs(value[1] - other[1]))
    return math.isfinite(distance) and distance > _TOLERANCE * max(value[1], other[1])


_WORDS = (
    "behind the first steps, ranks have other values of {names}, since each computes them from its own samples. Every "
    "step begins with those of rank 0, as under torch's DistributedDataParallel, so what other ranks add to them is "
    "lost. {advice}"
)
_NORMS = "Trainer(sync_batchnorm=True) takes statistics of the samples of all ranks, on CUDA devices"
_OTHERS = "Average what a step writes into a buffer over the ranks, as in value = self.all_gather(value).mean(0)"

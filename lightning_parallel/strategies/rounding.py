"""Gradients that move far by rounding alone: those of a ReLU or a maximum that switches at a value next to it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lightning_parallel.module.differences import Tolerance
from lightning_parallel.module.kept_state import KeptState
from lightning_parallel.ranks.objects import of_all_ranks
from lightning_parallel.ranks.random_streams import RandomState

if TYPE_CHECKING:
    from lightning_parallel.strategies.plain_step import PlainSteps

_NUDGE = 100.0
"""Units of the dtype's precision by which weights are moved: sums over a whole layer round by that."""
_FINE = 1e-6
"""The precision from which on a coarser one has a tolerance that lets such gradients pass anyway."""
_TIMES, _MOST = 3.0, 10.0
"""Multiples of that distance, and of the tolerance, up to which a difference is explained."""


def explained_by_rounding(
    found: Mapping[str, float], plain: PlainSteps, state: RandomState | None, tolerance: Tolerance
) -> bool:
    """Whether gradients are no further from those of one process than its own move by rounding. A collective.

    Args:
        found: Name of a parameter -> the difference, as a share of the norm; none on any rank where nothing differs.
        plain: The steps of the copy.
        state: The random state with which its last step began.
        tolerance: The differences that need no explanation.
    """
    is_near = max(found.values(), default=0.0) <= _MOST * tolerance.gradient
    if not all(of_all_ranks(is_near and tolerance.precision < _FINE and state is not None)):
        return False
    assert state is not None
    first = _gradients(plain, state)
    with _nudged(plain.module, _NUDGE * tolerance.precision):
        second = _gradients(plain, state)
    moved = {name: _distance(first.get(name), second.get(name)) for name in found}
    return all(of_all_ranks(all(apart <= _TIMES * moved[name] for name, apart in found.items())))


def _gradients(plain: PlainSteps, state: RandomState) -> dict[str, Tensor]:
    """The gradients of the copy's last step, taken once more, without a trace of it."""
    before, hooks, now = KeptState(plain.module), plain.in_hooks, RandomState.take(plain.device)
    state.restore(plain.device)
    try:
        return plain.run(*plain.given)[1]
    finally:
        now.restore(plain.device)
        before.restore()
        plain.in_hooks = hooks


@contextlib.contextmanager
def _nudged(module: nn.Module, share: float) -> Iterator[None]:
    """Inside this context, each weight is another one, by at most that share of it."""
    before = [(p, p.detach().clone()) for p in module.parameters() if p.is_floating_point()]
    for parameter, value in before:
        wave = torch.arange(value.numel(), device=value.device).cos().view(value.shape).to(value.dtype)
        parameter.detach().copy_(value + share * wave * value)
    try:
        yield
    finally:
        for parameter, value in before:
            parameter.detach().copy_(value)


def _distance(first: Tensor | None, second: Tensor | None) -> float:
    if first is None or second is None:
        return 0.0
    return float((second - first).double().norm() / first.double().norm().clamp_min(1e-300))

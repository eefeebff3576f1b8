"""States of metrics: private names of torchmetrics."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils._pytree import tree_map_only

if TYPE_CHECKING:
    from torchmetrics import Metric


def last_value(metric: Metric) -> Any:
    """The last value of `metric.forward`. `Metric._forward_cache`, since 0.1; waits for a public property."""
    return metric._forward_cache


def set_last_value(metric: Metric, value: Any) -> None:
    """Let `value` be what `metric.forward` has returned last, as loggers show it in each step."""
    metric._forward_cache = value


def state_names(metric: Metric) -> Sequence[str]:
    """Names of the states of `metric`. `Metric._defaults`, since 0.1; waits for a public property."""
    return list(metric._defaults)


def set_states(metric: Metric, values: Mapping[str, Any], *, last: Any) -> None:
    """Let `metric` have the attributes `values`, and compute from them when it is asked next.

    Args:
        metric: The metric.
        values: Name -> value, of states and numbers.
        last: What its `forward` returned last.

    `Metric._computed` and `_forward_cache`, since 0.1; wait for a public way to load states, as `state_dict` has those
    that are persistent only.
    """
    metric._computed, metric._forward_cache = None, last
    for name, value in values.items():
        setattr(metric, name, value)


def empty_states(metric: Metric) -> dict[str, Any]:
    """Attributes of `metric` for `other_states`, as they are before any sample: `Metric._defaults` and counters."""
    device = metric.device
    defaults: dict[str, Any] = {
        name: [] if isinstance(default, list) else default.detach().clone().to(device)
        for name, default in metric._defaults.items()
    }
    return {**defaults, "_update_count": 0}


@contextlib.contextmanager
def other_states(metric: Metric, states: dict[str, Any]) -> Iterator[None]:
    """Inside this context, `metric` has `states`, which follow it, and its value is that of this rank.

    `Metric._update_count`, `_computed`, `_forward_cache`, `_to_sync` and `_should_unsync`, since 0.8 at the latest; its
    own forward exchanges states in the same way, and there is no public one.

    Args:
        metric: The metric.
        states: Names of attributes -> values, as from `empty_states`; those in the end are written here.
    """
    kept = ("_computed", "_forward_cache", "_to_sync", "_should_unsync", *states)
    before = {name: getattr(metric, name) for name in kept}
    for name, value in {**states, "_computed": None, "_to_sync": False, "_should_unsync": False}.items():
        setattr(metric, name, value)
    try:
        yield
        states.update(tree_map_only(Tensor, Tensor.detach, {name: getattr(metric, name) for name in states}))
    finally:
        for name, value in before.items():
            setattr(metric, name, value)

"""States of metrics: private names of torchmetrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchmetrics import Metric


def last_value(metric: Metric) -> Any:
    """The last value of `metric.forward`. `Metric._forward_cache`, since 0.1; waits for a public property."""
    return metric._forward_cache


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

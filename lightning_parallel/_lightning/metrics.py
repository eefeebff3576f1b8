"""States of metrics: private names of torchmetrics."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

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


def empty_copy(metric: Metric) -> Metric:
    """Copy `metric` without samples, and without the hooks on it; its value is that of this rank.

    `torch.nn.Module._forward_hooks`, since 0.2: a hook may hold what cannot be copied; there is no public way to leave
    it out.
    """
    states = {name: getattr(metric, name) for name in state_names(metric)}
    without = {id(metric._forward_hooks): OrderedDict[int, Any]()}
    for name, state in states.items():
        setattr(metric, name, [] if isinstance(state, list) else state)
    try:
        empty = copy.deepcopy(metric, without)
    finally:
        for name, state in states.items():
            setattr(metric, name, state)
    empty.sync_on_compute = False
    empty.reset()
    return empty

"""States of metrics, in the module and in its plain copy: each sample has to count as often as in one process."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torchmetrics import Metric, MetricCollection

from lightning_parallel import _lightning
from lightning_parallel.module.differences import Tolerance, state_differences
from lightning_parallel.module.held_modules import held_modules
from lightning_parallel.ranks.dtensors import full_of
from lightning_parallel.strategies.step_metrics import numbers_of

MetricStates = dict[str, dict[str, Tensor]]
"""Path of a metric -> name of a state -> a copy of it; what a list holds is one tensor."""
_MOST = 3
"""Number of metrics that are named."""


def states_of_metrics(module: nn.Module) -> MetricStates:
    """The states of all metrics in `module`, copied; without those that are no tensors."""
    return {path: _states(metric) for path, metric in metrics_in(module).items()}


def follow_metrics(plain: nn.Module, module: nn.Module) -> None:
    """Give the metrics of a copy the states that those of the module have.

    Args:
        plain: The copy.
        module: The module.
    """
    ours = metrics_in(module)
    for path, metric in metrics_in(plain).items():
        if (own := ours.get(path)) is not None:
            states = {name: getattr(own, name) for name in _lightning.metrics.state_names(own)}
            states = tree_map_only(Tensor, lambda value: value.detach().clone(), states)
            _lightning.metrics.set_states(metric, {**numbers_of(own), **states}, last=None)


def num_updated(module: nn.Module) -> int:
    """The number of metrics in `module` that have counted something."""
    return sum(1 for metric in metrics_in(module).values() if metric.update_called)


def metric_differences(
    ours: MetricStates, expected: MetricStates, tolerance: Tolerance, *, over: str = ""
) -> list[str]:
    """Metrics whose states differ, in words.

    Args:
        ours: States of the module's metrics.
        expected: Those of the copy's.
        tolerance: How far they may be apart.
        over: What they were reduced over.
    """
    found = []
    for path, states in expected.items():
        own = ours.get(path, {})
        names = [name for name in states if name in own]
        apart = state_differences({n: own[n] for n in names}, {n: states[n] for n in names}, tolerance)
        if apart:
            name = next(iter(apart))
            values = _in_place_of(own[name], states[name])
            found.append(f"the metric {path!r} has {values} in its state {name!r}{over}")
    others = len(found) - _MOST
    return found[:_MOST] + ([f"{others} more metrics differ"] if others > 0 else [])


def synced_differences(
    module: nn.Module, plain: nn.Module, group: dist.ProcessGroup | None, tolerance: Tolerance
) -> list[str]:
    """Metrics that count otherwise where torchmetrics adds up over ranks, in words. A collective of all ranks.

    Args:
        module: The module, whose metrics are added up as they are when they compute.
        plain: Its copy; its metrics are given the same states, and added up over `group`.
        group: The ranks that read different samples.
        tolerance: How far they may be apart.
    """
    if group is None or not dist.is_initialized() or group.size() == dist.get_world_size():
        return []
    follow_metrics(plain, module)
    ours, theirs = metrics_in(module), metrics_in(plain)
    kinds: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(kinds, {path: _kind(metric) for path, metric in ours.items() if path in theirs})
    own: MetricStates = {}
    expected: MetricStates = {}
    for path, kind in kinds[0].items():
        # Only where all ranks send the same messages: others wait for those that one of them leaves out.
        if kind is not None and all(others.get(path) == kind for others in kinds):
            own[path], expected[path] = _synced(ours[path], None), _synced(theirs[path], group)
    return metric_differences(own, expected, tolerance, over=", added up over the ranks")


def metrics_in(module: nn.Module) -> dict[str, Metric]:
    """Path -> metric, also of those in collections, lists and dicts."""
    held = held_modules(module)
    for child in held.values():
        if isinstance(child, MetricCollection):
            child.items(keep_base=True, copy_state=False)  # one metric of a group of equal states has them for all
    return {path: child for path, child in held.items() if isinstance(child, Metric)}


def _states(metric: Metric) -> dict[str, Tensor]:
    joined = {name: _joined(getattr(metric, name)) for name in _lightning.metrics.state_names(metric)}
    return {name: value for name, value in joined.items() if value is not None}


def _joined(state: Any) -> Tensor | None:
    """A copy of a state, the entries of a list one behind the other; ``None`` where they are no tensors that can be."""
    if isinstance(state, Tensor):
        return full_of(state).detach().clone()
    if not isinstance(state, list) or not all(isinstance(entry, Tensor) for entry in state):
        return None
    entries = [entry.detach().reshape(1) if entry.ndim == 0 else entry.detach() for entry in state]
    if len({(entry.shape[1:], entry.device) for entry in entries}) > 1:
        return None
    return torch.cat(entries) if entries else torch.empty(0)


def _kind(metric: Metric) -> Any:
    """The messages that a metric sends to be added up; ``None`` where nobody adds it up, or it says how itself."""
    if metric.dist_sync_fn is not None or metric.process_group is not None or not metric.sync_on_compute:
        return None
    states = {name: getattr(metric, name) for name in _lightning.metrics.state_names(metric)}
    entries = {name: value if isinstance(value, list) else [value] for name, value in states.items()}
    is_whole = all(isinstance(entry, Tensor) for each in entries.values() for entry in each)
    if not states or not is_whole or not metric.update_called:
        return None
    return {name: [(entry.ndim, str(entry.dtype)) for entry in each] for name, each in entries.items()}


def _synced(metric: Metric, group: dist.ProcessGroup | None) -> dict[str, Tensor]:
    """The states of `metric`, added up. A collective of `group`, or of those that torchmetrics asks by itself."""
    try:
        with metric.sync_context(process_group=group):
            return _states(metric)
    except Exception:  # also on the other ranks, since they do the same; the user will hear of it where it matters
        return {}


def _in_place_of(ours: Tensor, expected: Tensor) -> str:
    if ours.shape != expected.shape:
        if ours.ndim and expected.ndim and len(ours) != len(expected):
            return f"{len(ours)} entries in place of {len(expected)}"
        return f"the shape {list(ours.shape)} in place of {list(expected.shape)}"
    if ours.numel() == 1:
        return f"{float(ours):.6g} in place of {float(expected):.6g}"
    return f"values that add up to {float(ours.double().sum()):.6g} in place of {float(expected.double().sum()):.6g}"

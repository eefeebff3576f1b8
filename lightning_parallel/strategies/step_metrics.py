"""Metrics that a step updates through a pipeline: every stage has the states of the last one, which runs to the end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torchmetrics import Metric, MetricCollection

from lightning_parallel import _lightning
from lightning_parallel.module.held_modules import held_modules
from lightning_parallel.module.object_state import ObjectState
from lightning_parallel.module.placeholders import Placeholder, placeholders_in
from lightning_parallel.strategies.metric_values import BatchValues


@dataclass(frozen=True)
class UpdatedMetric:
    """A metric that a step has updated.

    Args:
        path: Where it is in the module.
        values: Its states that are tensors, and its numbers, by name.
        lists: Its states that are lists, by name: how many entries are from before the step, and the new ones.
        last: What its forward has returned for the batch.
    """

    path: str
    values: dict[str, Any]
    lists: dict[str, tuple[int, list[Any]]]
    last: Any


@dataclass
class _Before:
    """A metric before a step; entries of lists are kept, so that none of the step can be taken for one of them."""

    metric: Metric
    updates: int
    tensors: dict[str, tuple[Tensor, int]] = field(default_factory=dict)
    lists: dict[str, list[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in _lightning.metrics.state_names(self.metric):
            state = getattr(self.metric, name)
            if isinstance(state, Tensor):
                self.tensors[name] = state, _version(state)
            else:
                self.lists[name] = list(state)

    @property
    def is_other(self) -> bool:
        """Whether the metric has been updated or reset since."""
        states = {name: getattr(self.metric, name) for name in (*self.tensors, *self.lists)}
        return (
            self.metric.update_count != self.updates
            or any(states[name] is not old or _version(old) != version for name, (old, version) in self.tensors.items())
            or any(len(states[name]) != self.num_kept(name) for name in self.lists)
        )

    def states(self) -> list[Any]:
        """Its states now, without entries of lists from before."""
        lists = [getattr(self.metric, name)[self.num_kept(name) :] for name in self.lists]
        return [*(getattr(self.metric, name) for name in self.tensors), *lists]

    def num_kept(self, name: str) -> int:
        """Number of entries of a list that are from before: all of these, or none."""
        old, now = self.lists[name], getattr(self.metric, name)
        is_kept = len(now) >= len(old) and all(a is b for a, b in zip(old, now, strict=False))
        return len(old) if is_kept else 0


class StepMetrics:
    """The metrics of a module that a step updates.

    The step runs to its end on the last stage only, and begins on all of them, two of which may be on one rank. What
    other stages count before the stack is dropped, and they take over the states of the last one: each sample counts
    once, and ranks that read other samples are all that is left to reduce over.

    Args:
        module: The module, before the step.
    """

    def __init__(self, module: nn.Module) -> None:
        held = held_modules(module)
        self._before = {path: _Before(m, m.update_count) for path, m in held.items() if isinstance(m, Metric)}
        self._values = BatchValues({path: before.metric for path, before in self._before.items()})
        self._collections = [child for child in held.values() if isinstance(child, MetricCollection)]

    def placeholders(self) -> list[Placeholder]:
        """Placeholders in states: values that only another stage computes."""
        return placeholders_in([before.states() for before in self._before.values()])

    @contextmanager
    def shown(self, *, is_cut: bool) -> Iterator[None]:
        """Inside this context a step runs; behind it, metrics have returned their value for all of its samples last.

        Args:
            is_cut: Whether metrics are called with one microbatch after the other.
        """
        with self._values.noted() if is_cut else nullcontext():
            yield
        self._values.show()

    def of_part(self) -> AbstractContextManager[None]:
        """Open it around each microbatch on the stage that ends the step."""
        return self._values.part()

    @contextmanager
    def dropped(self) -> Iterator[None]:
        """Inside this context, updates go into copies, which are dropped."""
        states = [ObjectState(before.metric) for before in self._before.values()]
        for before in self._before.values():
            for name in before.tensors:
                setattr(before.metric, name, getattr(before.metric, name).clone())
        try:
            with self._values.paused():
                yield
        finally:
            for state in states:
                state.restore()

    def updated(self) -> list[UpdatedMetric]:
        """The metrics that were updated since this object was made; called on the last stage."""
        for collection in self._collections:
            collection.items(keep_base=True, copy_state=False)  # one metric of a group of equal states has them for all
        return [_update_of(path, before) for path, before in self._before.items() if before.is_other]

    def follow(self, updated: Sequence[UpdatedMetric]) -> None:
        """Take over the states of the last stage.

        Args:
            updated: From `updated`, on the last stage.
        """
        others = {each.path: each for each in updated}
        for path, before in self._before.items():
            if path in others:
                _take_over(before, others[path])


def _update_of(path: str, before: _Before) -> UpdatedMetric:
    metric, lists = before.metric, {}
    for name in before.lists:
        kept = before.num_kept(name)
        lists[name] = kept, getattr(metric, name)[kept:]
    values = {**numbers_of(metric), **{name: getattr(metric, name) for name in before.tensors}}
    values, lists, last = tree_map_only(Tensor, _on_host, (values, lists, _lightning.metrics.last_value(metric)))
    return UpdatedMetric(path, values, lists, last)


def numbers_of(metric: Metric) -> dict[str, Any]:
    """The attributes of `metric` that are numbers or names, such as how often it was updated."""
    return {name: value for name, value in vars(metric).items() if type(value) in (bool, int, float, str)}


def _take_over(before: _Before, other: UpdatedMetric) -> None:
    metric = before.metric
    device = metric.device
    values, last = tree_map_only(Tensor, lambda value: value.to(device), (other.values, other.last))
    device = torch.device("cpu") if metric.compute_on_cpu else device
    new = tree_map_only(Tensor, lambda value: value.to(device), other.lists)
    lists = {name: [*before.lists[name][:kept], *entries] for name, (kept, entries) in new.items()}
    _lightning.metrics.set_states(metric, {**values, **lists}, last=last)


def _version(state: Tensor) -> int:
    """Count of writes into a tensor; those that are made under `inference_mode` have none."""
    return 0 if state.is_inference() else state._version


def _on_host(value: Tensor) -> Tensor:
    return value.detach().cpu()

"""Metrics that only the last stage of a pipeline updates: the other stages mark them as updated, with empty states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torchmetrics import Metric

from lightning_parallel import _lightning


@dataclass(frozen=True)
class UpdatedMetric:
    """A metric that a step has updated.

    Args:
        path: Where it is in the module.
        updates: How often it was updated so far.
        last: What it computed for the last microbatch.
        lists: Name of a state that is a list -> dtype and shape of an entry, without the first dimension.
    """

    path: str
    updates: int
    last: Any
    lists: dict[str, tuple[torch.dtype, tuple[int, ...]]]


class StepMetrics:
    """The metrics of a module that a step updates.

    Args:
        module: The module, before the step.
    """

    def __init__(self, module: nn.Module) -> None:
        self._metrics = {path: child for path, child in module.named_modules() if isinstance(child, Metric)}
        self._counts = {path: metric.update_count for path, metric in self._metrics.items()}

    def updated(self) -> list[UpdatedMetric]:
        """The metrics that were updated since this object was made; called on the stage that updates."""
        changed = {path: m for path, m in self._metrics.items() if m.update_count != self._counts[path]}
        return [
            UpdatedMetric(
                path,
                metric.update_count,
                tree_map_only(Tensor, Tensor.cpu, _lightning.last_value(metric)),
                _list_states(metric),
            )
            for path, metric in changed.items()
        ]

    def follow(self, updated: Sequence[UpdatedMetric]) -> None:
        """Mark the metrics of another stage as updated, with empty states.

        Torchmetrics adds up the states of all ranks, and gathers lists of them only where no list is empty.
        """
        for each in updated:
            metric = self._metrics[each.path]
            device = metric.device
            last = each.last.to(device) if isinstance(each.last, Tensor) else each.last
            lists = {
                name: torch.empty((0, *tail), dtype=dtype, device=device) for name, (dtype, tail) in each.lists.items()
            }
            _lightning.set_updated(metric, updates=each.updates, last=last, lists=lists)


def _list_states(metric: Metric) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    states = {name: getattr(metric, name) for name in _lightning.state_names(metric)}
    lists = {name: state[0] for name, state in states.items() if isinstance(state, list) and state}
    return {name: (entry.dtype, tuple(entry.shape[1:])) for name, entry in lists.items()}

"""A module that collects what its steps have in containers and objects, as people write their logs."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.models.pipelined import DeepTied


class Meter:
    """A mean, and what it is of."""

    def __init__(self) -> None:
        self.sum, self.history = 0.0, [0.0]

    def update(self, value: float) -> None:
        self.sum += value
        self.history.append(value)


class Tracker:
    """Meters by name, which appear when they are first asked for."""

    def __init__(self) -> None:
        self.meters: defaultdict[str, Meter] = defaultdict(Meter)


class Collects(DeepTied):
    """Puts the number of samples of each step into ten containers, nested ones and objects among them."""

    def __init__(self) -> None:
        super().__init__("sgd")
        self.in_dict: dict[str, list[float]] = {"train": [], "val": []}
        self.in_lists: list[list[float]] = [[], []]
        self.by_name: defaultdict[str, list[float]] = defaultdict(list)
        self.recent: deque[float] = deque(maxlen=100)
        self.counted: Counter[str] = Counter()
        self.steps: dict[str, set[int]] = {"train": set(), "val": set()}
        self.sums = {"train": {"sum": torch.zeros(1)}, "val": {"sum": torch.zeros(1)}}
        self.plain = SimpleNamespace(train=[], val=[])
        self.meters = {"train": Meter(), "val": Meter()}
        self.tracker = Tracker()

    def collect(self, stage: str, tokens: Tensor) -> None:
        value = float(len(tokens))
        self.in_dict[stage].append(value)
        self.in_lists[stage == "val"].append(value)
        self.by_name[stage].append(value)
        self.recent.append(value)
        self.counted[stage] += len(tokens)
        self.steps[stage].add(len(self.steps[stage]))
        self.sums[stage]["sum"] += value
        getattr(self.plain, stage).append(value)
        self.meters[stage].update(value)
        self.tracker.meters[stage].update(value)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.collect("train", batch[0])
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self(batch[0])
        self.collect("val", batch[0])

    def collected(self) -> dict[str, Any]:
        """All of it, in numbers."""
        meters = {**self.meters, **{f"lazy {name}": meter for name, meter in self.tracker.meters.items()}}
        return {
            "in_dict": self.in_dict,
            "in_lists": self.in_lists,
            "by_name": dict(self.by_name),
            "recent": list(self.recent),
            "counted": dict(self.counted),
            "steps": self.steps,
            "sums": {stage: float(each["sum"]) for stage, each in self.sums.items()},
            "plain": vars(self.plain),
            "meters": {name: (meter.sum, meter.history) for name, meter in meters.items()},
        }

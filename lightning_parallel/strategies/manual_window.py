"""The part of a step under manual optimization that is compared with one process: up to its first update.

Later losses of the step depend on that update, which the copy does not make.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_parallel.module.differences import value_difference
from lightning_parallel.ranks.objects import of_all_ranks
from lightning_parallel.strategies.compared_metrics import synced_differences
from lightning_parallel.strategies.compared_window import ComparedWindow, number_in_words, whole_gradient
from lightning_parallel.strategies.plain_step import StepValues


@dataclass
class ManualWindow(ComparedWindow):
    """Compares losses that `manual_backward` is given, and gradients behind the last of them.

    These are noted as they are then: the step may clip them before it updates.
    """

    _is_held: bool = False
    _noted: dict[str, Tensor] | None = None
    _factors: list[float] = field(default_factory=list)

    @override
    def _park(self) -> None:
        """Do nothing: the copy is used before the step is over."""

    @property
    def has_missed_update(self) -> bool:
        """Whether the copy's last step has come to an update, and the real one has not told of any."""
        return self.expected.updates

    @override
    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False

    @override
    def watch(self, loss: Tensor) -> None:
        super().watch(loss)
        self.ours.losses.append(loss.detach().clone())

    @override
    def add_gradients(self, group: dist.ProcessGroup | None) -> None:
        self.num_backwards += 1
        factor = self.gradients.scale.value
        self._factors.append(float(factor) if not isinstance(factor, Tensor) or factor.numel() == 1 else math.nan)
        names = list(self.plain.trained())
        parameters = dict(self.plain.originals.named_parameters())
        self._noted = None if self._is_held else {name: whole_gradient(parameters[name]).clone() for name in names}

    @override
    def value_differences(self, ours: StepValues) -> list[str]:
        # Hooks and callbacks around backward log and count inside of the step, and not all of them run on the copy.
        logged = {key: value for key, value in ours.logged.items() if key in self.expected.logged}
        metrics = {} if self.has_hook else ours.metrics
        found = super().value_differences(StepValues(ours.loss, logged, metrics))
        if len(ours.losses) != len(self.expected.losses):
            found.append(
                f"the step has called backward {len(ours.losses)} times in place of {len(self.expected.losses)}"
            )
        for number, (loss, expected) in enumerate(zip(ours.losses, self.expected.losses, strict=False), start=1):
            if not (apart := value_difference(loss, expected)) <= self.tolerance.value:
                values = f"{number_in_words(loss)} in place of {number_in_words(expected)} ({apart:.1e} apart)"
                found.append(f"the loss of backward {number} is {values}")
            elif self.losses is None:
                self.losses = float(loss), float(expected)
        return found

    def steady_differences(self) -> list[str]:
        """Differences, without logged values that the copy's step does not give twice. A collective of all ranks."""
        names: list[str] = []
        if any(of_all_ranks(self.value_differences(self.ours))):
            with contextlib.suppress(Exception):  # of the user's code: then everything counts
                names = self.unsteady(self.run_again())
            self.leave_out({name for each in of_all_ranks(names) for name in each})
        return self.value_differences(self.ours)

    @override
    def update_differences(self, group: dist.ProcessGroup | None) -> list[str]:
        self.ours.take_metrics(self.plain.originals)
        self.gradients.take(self._factors[-1], group)
        expected = self.gradients.averaged(group)  # on all ranks, also if this one has nothing to compare
        found = [] if self.expected.updates else ["the step updates parameters, and that of one process does not"]
        found += self.steady_differences()
        if self._noted is not None and self._is_one_sum:
            self.num_gradients = len(expected)
            found += self.gradient_differences(self._noted.__getitem__, expected)
        return [*found, *synced_differences(self.plain.originals, self.plain.module, group, self.tolerance)]

    @property
    @override
    def extent(self) -> str:
        return " up to its first update"

    @property
    def _is_one_sum(self) -> bool:
        """Whether gradients are those of the copy, multiplied by one number and given to the hook once."""
        is_one = len(self._factors) == 1 or not self.has_hook
        return is_one and len(set(self._factors)) == 1 and math.isfinite(self._factors[0]) and self.plain.scales_alike

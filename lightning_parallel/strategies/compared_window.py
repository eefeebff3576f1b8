"""The accumulation window of a fit that is compared with one process: the values and gradients of both."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from lightning_parallel.checkpoint.full_state import whole
from lightning_parallel.module.differences import Tolerance, first_of, gradient_differences, value_difference
from lightning_parallel.ranks.objects import of_all_ranks
from lightning_parallel.ranks.random_streams import RandomState
from lightning_parallel.ranks.sketches import Sketches, unlike
from lightning_parallel.ranks.stage_owners import stage_owners_of
from lightning_parallel.strategies.compared_metrics import (
    MetricStates,
    metric_differences,
    num_updated,
    states_of_metrics,
    synced_differences,
)
from lightning_parallel.strategies.compared_presence import presence_differences
from lightning_parallel.strategies.parked_copy import ParkedCopy
from lightning_parallel.strategies.plain_step import PlainSteps, StepValues, dense
from lightning_parallel.strategies.rounding import explained_by_rounding
from lightning_parallel.strategies.window_gradients import WindowGradients

_SURE = 0.1
"""The share of the tolerance up to which sketches show that gradients are equal: beyond, these are gathered."""


@dataclass
class ComparedWindow:
    """The accumulation window that is compared.

    Args:
        plain: The steps of the copy.
        tolerance: How far the two may be apart.
        state: The random state with which the last step began.
        layers: The layers that both have, in words, where others are left out.
        num_processes: The ranks of this machine.
        rounded: Gradients further apart than the tolerance, as those of one process are by rounding alone.
    """

    plain: PlainSteps
    tolerance: Tolerance
    state: RandomState | None = None
    layers: str = ""
    num_processes: int = 1
    num_backwards: int = 0
    num_gradients: int = 0
    ours: StepValues = field(default_factory=StepValues)
    expected: StepValues = field(default_factory=StepValues)
    gradients: WindowGradients = field(init=False)
    _parked: ParkedCopy = field(init=False)
    _in_hooks: StepValues = field(default_factory=StepValues)
    losses: tuple[float, float] | None = None
    left_out: set[str] = field(default_factory=set)
    rounded: Mapping[str, float] = field(default_factory=dict)
    _metrics_at_backward: MetricStates = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.gradients = WindowGradients(self.plain)
        self._parked = ParkedCopy(self.plain.device, self.num_processes)

    def _park(self) -> None:
        if not self.layers:
            gradients = [*self.gradients.pending.values(), *self.gradients.sums.values()]
            self._parked.park(self.plain.module, self.plain.originals, gradients)

    def take_plain_step(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Run the copy's next step."""
        self._parked.fetch()  # a step may have had no backward
        self.expected, self.gradients.pending = self.plain.run(args, kwargs)
        self._park()

    def value_differences(self, ours: StepValues) -> list[str]:
        """Loss, logged values and states of metrics that differ, in words."""
        loss, expected = ours.loss, self.expected.loss
        found = []
        if not (apart := value_difference(loss, expected)) <= self.tolerance.value:
            found.append(
                f"the loss is {number_in_words(loss)} in place of {number_in_words(expected)} ({apart:.1e} apart)"
            )
        elif self.losses is None and loss is not None and expected is not None:
            self.losses = float(loss), float(expected)
        found += self._log_differences(ours, self.expected)
        return found + metric_differences(ours.metrics, self.expected.metrics, self.tolerance)

    def run_again(self, watching: contextlib.AbstractContextManager[object] | None = None) -> StepValues:
        """The values of the copy's last step, when it runs again."""
        assert self.state is not None
        self._parked.fetch()
        try:
            return self.plain.run_again(self.state, watching)
        finally:
            self._park()

    def unsteady(self, again: StepValues) -> list[str]:
        """Names of logged values that the copy's step does not give twice.

        Args:
            again: Its values, when it runs again.
        """
        first, second = self.expected.numbers(), again.numbers()
        tolerance = self.tolerance.value
        return [n for n in {**first, **second} if not value_difference(second.get(n), first.get(n)) <= tolerance]

    def leave_out(self, names: Collection[str]) -> None:
        """Compare no logged values of these names.

        Args:
            names: As `unsteady` returns them, of any rank.
        """
        self.left_out |= set(names)
        self.ours.leave_out(names)
        self.expected.leave_out(names)

    def hook_differences(self) -> list[str]:
        """Differences in what hooks around the last backward have logged, and given to metrics, in words."""
        # Without what only the real step has logged: callbacks do, which do not run on the copy.
        logged = {key: value for key, value in self._in_hooks.logged.items() if key in self.plain.in_hooks.logged}
        found = self._log_differences(StepValues(logged=logged), self.plain.in_hooks)
        before, after = self.expected.metrics, self.plain.in_hooks.metrics
        updated = {
            path: states
            for path, states in after.items()
            if any(not _is_same(value, before[path].get(name)) for name, value in states.items())
            # Not if another hook has been there in between, which does not run on the copy.
            and not metric_differences(self._metrics_at_backward, {path: before[path]}, self.tolerance)
        }
        return found + metric_differences(states_of_metrics(self.plain.originals), updated, self.tolerance)

    def _log_differences(self, ours: StepValues, expected: StepValues) -> list[str]:
        found, own, theirs = [], ours.numbers(), expected.numbers()
        for name in [*theirs, *(name for name in own if name not in theirs)]:
            value, reference = own.get(name), theirs.get(name)
            if not value_difference(value, reference) <= self.tolerance.value:
                found.append(f"{name!r} is logged as {number_in_words(value)} in place of {number_in_words(reference)}")
        return found

    def held(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which gradients are left as they are on each rank."""
        return contextlib.nullcontext()

    def watch(self, loss: Tensor) -> None:
        """Watch the gradient of `loss`, once it has passed all hooks."""
        self.gradients.begin(loss)

    def add_gradients(self, group: dist.ProcessGroup | None) -> None:
        """Add the gradients of the copy's last step, multiplied as the real ones were. A collective if hooks see them.

        Args:
            group: The ranks that read different samples; ``None`` for one process.
        """
        self._parked.fetch()
        self.num_backwards += 1
        self.gradients.add(group)
        if self.has_hook:  # in each microstep, of all gradients so far
            self.gradients.sums = self.gradients.averaged(group)

    @property
    def has_hook(self) -> bool:
        """Whether the module changes, logs or counts something behind each backward."""
        return is_overridden("on_after_backward", self.plain.originals)

    @contextlib.contextmanager
    def of_hooks(self, module: LightningModule) -> Iterator[None]:
        """Note what the hooks around a backward of `module` log, and the metrics before them."""
        self._in_hooks, self._metrics_at_backward = StepValues(), states_of_metrics(module)
        with self._in_hooks.of(module, passes_on=True):
            yield

    def update_differences(self, group: dist.ProcessGroup | None) -> list[str]:
        """Differences that show before the update, in words. A collective of all ranks.

        Args:
            group: The ranks that read different samples; ``None`` for one process.
        """
        self._parked.fetch()  # the last step of the window may have had no backward
        parameters = dict(self.plain.originals.named_parameters())
        self.num_gradients = len(self.plain.trained())
        if gone := [name for name, _ in self.plain.module.named_parameters() if name not in parameters]:
            return [f"a hook has tied or removed {first_of(gone)} since the module was made parallel; do it in setup"]
        apart = [] if self.has_hook else _presence(self.plain, self.gradients.used, group)
        if self.has_hook or any(of_all_ranks(_look_different(self.plain, self.gradients.sums, group, self.tolerance))):
            expected = self.gradients.sums if self.has_hook else self.gradients.averaged(group)
            self.num_gradients = len(expected)
            apart += self._unexplained(lambda name: whole_gradient(parameters[name]), expected)
        self.gradients.sums = {}
        found = [*self.hook_differences(), *apart]
        return [*found, *synced_differences(self.plain.originals, self.plain.module, group, self.tolerance)]

    def gradient_differences(self, ours: Callable[[str], Tensor], expected: Mapping[str, Tensor]) -> list[str]:
        """Gradients that differ, in words.

        Args:
            ours: Returns the whole gradient of the parameter of a name.
            expected: As `WindowGradients.averaged` returns them.
        """
        found = gradient_differences(ours, expected, self.tolerance)
        return self._in_words(found, expected)

    def _unexplained(self, ours: Callable[[str], Tensor], expected: Mapping[str, Tensor]) -> list[str]:
        """As `gradient_differences`, without those that rounding alone can make. A collective."""
        found = gradient_differences(ours, expected, self.tolerance)
        if any(of_all_ranks(bool(found))) and explained_by_rounding(found, self.plain, self.state, self.tolerance):
            self.rounded, found = found, {}
        return self._in_words(found, expected)

    def _in_words(self, found: Mapping[str, float], expected: Collection[str]) -> list[str]:
        words = _gradients_in_words(found, expected, self.gradients.used, self.tolerance)
        if words and (hooked := sorted(self.gradients.hooked & found.keys())):
            words[0] += (
                f"; {first_of(hooked)}: with a hook of its own, which is given the gradient of this rank's samples, "
                "before the mean over ranks. In on_after_backward, gradients are those of all samples"
            )
        return words

    @property
    def extent(self) -> str:
        """The part of the step that is compared, in words; empty for all of it."""
        return f" in a trial with {self.layers}" if self.layers else ""

    def summary(self) -> str:
        """The line that says that both are equal."""
        losses = "" if self.losses is None else f"loss {self.losses[0]:.4f} = {self.losses[1]:.4f}, "
        metrics = f", {number} metrics" if (number := num_updated(self.plain.module)) else ""
        left_out = f"; {first_of(sorted(self.left_out))}: not the same in two runs" if self.left_out else ""
        rest = f"{self.num_gradients} gradients{_rounded_in_words(self.rounded)}{metrics}{left_out}"
        return f"first step equals one process{self.extent}: {losses}{rest}"


def _gradients_in_words(
    found: Mapping[str, float], expected: Collection[str], used: Collection[str], tolerance: Tolerance
) -> list[str]:
    if not found:
        return []
    name, apart = next(iter(found.items()))
    unused = [name for name in expected if name not in used]
    return [
        f"{len(found)} of {len(expected)} gradients differ, that of {name!r} by {apart:.1e} of its norm (at most "
        f"{tolerance.gradient:.0e} is rounding): {first_of(list(found))}"
        + (f" (the step does not use {first_of(unused)})" if unused else "")
    ]


def _rounded_in_words(found: Mapping[str, float]) -> str:
    most = max(found.values(), default=0.0)
    told = f" ({len(found)} of them up to {most:.1e} apart, as far as rounding moves them in one process)"
    return told if found else ""


def whole_gradient(parameter: Tensor) -> Tensor:
    """The whole gradient, on every rank; zeros where there is none. A collective."""
    owners = stage_owners_of(parameter)
    return whole(torch.zeros_like(parameter) if parameter.grad is None else dense(parameter.grad), owners)


def _presence(plain: PlainSteps, used: Collection[str], group: dist.ProcessGroup | None) -> list[str]:
    own = {name: parameter for name, parameter in plain.originals.named_parameters() if _is_here(parameter)}
    return presence_differences(own, list(plain.trained()), used, plain.device, group)


def _look_different(
    plain: PlainSteps, gradients: Mapping[str, Tensor], group: dist.ProcessGroup | None, tolerance: Tolerance
) -> bool:
    """Whether gradients look different on this rank, before any is gathered. A collective of those that share some.

    Args:
        plain: The steps of the copy.
        gradients: Name -> gradient of the copy on this rank.
        group: The ranks that read different samples; ``None`` for one process.
        tolerance: How far they may be apart.
    """
    sketches = Sketches(plain.device)
    trained = plain.trained()
    expected = sketches.averaged(sketches.of(gradients, trained), group)
    own = {name: each for name, each in plain.originals.named_parameters() if name in trained and _is_here(each)}
    ours = {name: dense(each.grad) for name, each in own.items() if each.grad is not None}
    return bool(unlike(sketches.of(ours, own), expected, _SURE * tolerance.gradient, tolerance.negligible))


def _is_here(parameter: Tensor) -> bool:
    owners = stage_owners_of(parameter)
    return owners is None or owners.is_here


def _is_same(first: Tensor, second: Tensor | None) -> bool:
    return second is not None and first.shape == second.shape and torch.equal(first, second)


def number_in_words(value: Any) -> str:
    """A logged value or loss, for an error."""
    if value is None:
        return "nothing"
    tensor = torch.as_tensor(value).detach()
    return f"{float(tensor):.6g}" if tensor.numel() == 1 else f"a tensor of shape {list(tensor.shape)}"

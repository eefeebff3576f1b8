"""A layer that is split over ranks, compared with itself: what it computes, what it keeps, and gradients.

A layer whose results are right may still have gradients that are not, such as those of a backward that goes by the
length of the sequence or the number of features: it would train, and to something else.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_leaves

from lightning_parallel import _torch
from lightning_parallel.module.layer_run import Gradient, LayerRun, probing
from lightning_parallel.ranks.meetings import Meetings, RanksPartedError

_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4}
"""Of the largest element. Layers compute parts in fp32 even where all they are given is fp64."""
_TOLERANCE_OF_HALF = 5e-2
_SMALLEST = 1e-6
"""The size that a result of zeros is taken to have."""
_MODES = ((True, True), (False, True), (True, False), (False, False))
"""Whether to compute in fp64, and with gradients, for which a device may have no memory, and a layer no backward."""


@dataclass(frozen=True)
class Difference:
    """Where a split layer first differs from the whole one.

    Args:
        kind: In how many results there are, in whether there is a gradient, in a shape or in numbers.
        part: Of what: of the hidden states that it returns, of what it returns beside them, of what it keeps in
            attributes, or of gradients.
        ours: The number, whether there is one, or the shape, of the split layer.
        whole: The same of the whole one.
        name: Whose gradient it is.
        error: By how much, at most.
        allowed: How much would be no difference.
        beyond: Where it is more than that.
    """

    kind: Literal["number", "presence", "shape", "numbers"]
    part: Literal["hidden states", "others", "kept", "gradient"]
    ours: Any
    whole: Any
    name: str = ""
    error: float = 0.0
    allowed: float = 0.0
    beyond: Tensor | None = None

    @property
    def index(self) -> tuple[int, ...]:
        """Of the first element that differs."""
        assert self.beyond is not None
        return tuple(int(index) for index in self.beyond.nonzero()[0])

    def position(self, dim: int) -> int:
        """The first index along `dim` at which an element differs."""
        assert self.beyond is not None
        return int(self.beyond.nonzero()[:, dim].min())


@dataclass(frozen=True)
class Wording:
    """Sentences for users, of the technique that splits layers.

    Args:
        name: The layer.
        difference: Says what differs, and what to change.
        failure: Says by what error the split layer fails, in one or more sentences.
        elsewhere: Says that another rank knows more.
        apart: Says that ranks have come to different places, this one to that of the phrase.
    """

    name: str
    difference: Callable[[Difference], str]
    failure: Callable[[Exception], Sequence[str]]
    elsewhere: str
    apart: Callable[[str], str]


class LayerCheck:
    """Compares a layer with itself, on all ranks alike: none goes on to a collective that others do not reach.

    Args:
        layer: The layer; its parameters may be DTensors.
        arguments: Its arguments and those by name, whole, and equal on all ranks.
        wording: What users are told.
        has_any: Whether any of the ranks has a flag; a collective.
        reduce: From gradients of parameters on this rank to those that training updates with; a collective.
        group: The ranks that send each other something inside of the split layer, if any do.

    Example:
        >>> check = LayerCheck(layer, (args, kwargs), wording=wording, has_any=has_any)
        >>> error = check.run_whole(run)
        >>> violations = check.run_split(run_on_parts)
    """

    def __init__(
        self,
        layer: nn.Module,
        arguments: Any,
        *,
        wording: Wording,
        has_any: Callable[[bool], bool],
        reduce: Callable[[list[Tensor]], list[Tensor]] = list,
        group: ProcessGroup | None = None,
    ) -> None:
        self._layer, self._arguments = layer, arguments
        self.wording = wording
        self._has_any, self._reduce, self._group = has_any, reduce, group
        devices = (leaf.device for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor))
        self._device = next(devices, torch.device("cpu"))
        self._doubles = self._has_gradients = True
        self._is_training = torch.is_grad_enabled()
        self.whole: LayerRun | None = None
        """The results of the whole layer, once it has run on all ranks."""
        self.has_equal_results = False
        """Whether the latest `run_split` has found nothing wrong but with gradients, on all ranks."""

    def run_whole(
        self, run: Callable[..., Any], *, inside: Callable[[], contextlib.AbstractContextManager[Any]]
    ) -> Exception | None:
        """Run the whole layer. Not everything computes in fp64, or has the memory for a backward: it is tried.

        Args:
            run: Runs it on arguments and arguments by name.
            inside: Opens what makes it whole.

        Returns:
            Why this rank has failed in every way, if it has.
        """
        reason = None
        for self._doubles, self._has_gradients in _MODES:
            if reason is not None:
                reason.__traceback__ = None  # its frames hold the copies
            try:
                with self._open(), inside():
                    whole = LayerRun(self._layer, run, self._arguments, doubles=self._doubles)
                    if self._has_gradients:
                        whole.backward()
                error = None
            except Exception as caught:
                error = caught
            if not self._has_any(error is not None):
                self.whole = whole
                self._warn(reason)
                return None
            reason = error or reason
        return reason

    def run_split(self, run: Callable[..., Any], *, times: int = 1) -> list[str]:
        """Reasons why the split layer cannot take the place of the whole one; empty on all ranks if it can.

        Args:
            run: Runs it on whole arguments and arguments by name, and joins what it returns.
            times: How often, with what it has kept of the first run.
        """
        assert self.whole is not None
        self.has_equal_results = False
        with self._open():
            for _ in range(times):
                ours, found = self._attempt(lambda: LayerRun(self._layer, run, self._arguments, doubles=self._doubles))
                if ours is not None and (difference := _results_difference(ours, self.whole)):
                    found = [self.wording.difference(difference)]
                if found := self._agreed(found):
                    return found
            self.has_equal_results = True
            if not self._has_gradients:
                return []
            assert ours is not None
            _, found = self._attempt(ours.backward)
            if found := self._agreed(found):
                return found
            gradients = self._reduced(ours.gradients)
            difference = _gradients_difference(gradients, self.whole, autocast=self._autocast)
            return self._agreed([self.wording.difference(difference)] if difference else [])

    @contextlib.contextmanager
    def _open(self) -> Iterator[None]:
        with (
            torch.inference_mode(False),
            torch.set_grad_enabled(self._has_gradients),
            _torch.modes.without_dispatch_modes(),
            probing(self._layer, self._arguments, doubles=self._doubles, device=self._device.type),
        ):
            yield

    def _attempt(self, action: Callable[[], Any]) -> tuple[Any, list[str]]:
        """Do `action`, without waiting for a rank that does something else; returns its result, or violations."""
        meetings = None if self._group is None else Meetings(self._group, self._device)
        result, found = None, []
        try:
            with meetings or contextlib.nullcontext():
                result = action()
        except RanksPartedError:
            pass
        except Exception as failure:
            found = list(self.wording.failure(failure))
        if meetings is None:
            return result, found
        meetings.close(has_failed=bool(found))
        if meetings.has_parted and not found:
            found = [self.wording.elsewhere if meetings.has_failed_elsewhere else self.wording.apart(meetings.place)]
        return result, found

    def _agreed(self, found: list[str]) -> list[str]:
        """Violations on all ranks, or on none."""
        return (found or [self.wording.elsewhere]) if self._has_any(bool(found)) else []

    def _reduced(self, gradients: list[Gradient]) -> list[Gradient]:
        """The same as training reduces them; where one rank has a gradient, there is one."""
        own = [gradient for gradient in gradients if gradient.is_of_parameter]
        if not own:
            return gradients
        counts = torch.tensor([float(each.is_there) for each in own], device=own[0].value.device)
        counts, *values = self._reduce([counts, *(each.value for each in own)])
        reduced = [
            replace(each, value=value, is_there=bool(count))
            for each, value, count in zip(own, values, counts.tolist(), strict=True)
        ]
        return [*(each for each in gradients if not each.is_of_parameter), *reduced]

    @property
    def _autocast(self) -> torch.dtype | None:
        is_used = torch.is_autocast_enabled(self._device.type) and not self._doubles
        return torch.get_autocast_dtype(self._device.type) if is_used else None

    def _warn(self, reason: Exception | None) -> None:
        if self._is_training and not self._has_gradients:
            warnings.warn(
                f"{self.wording.name} is compared with itself by its results alone, for it has no gradients that "
                f"could be compared ({reason or 'on another rank'})",
                stacklevel=2,
            )


def _results_difference(ours: LayerRun, whole: LayerRun) -> Difference | None:
    if len(ours.results) != len(whole.results):
        return Difference("number", "others", len(ours.results), len(whole.results))
    for index, (one, other) in enumerate(zip(ours.results, whole.results, strict=True)):
        if difference := _difference("others" if index else "hidden states", one, other):
            return difference
    if len(ours.kept) != len(whole.kept):
        return Difference("number", "kept", len(ours.kept), len(whole.kept))
    found = (_difference("kept", one, other) for one, other in zip(ours.kept, whole.kept, strict=True))
    return next((difference for difference in found if difference), None)


def _gradients_difference(
    gradients: Sequence[Gradient], whole: LayerRun, *, autocast: torch.dtype | None
) -> Difference | None:
    """Where gradients differ from those of the `whole` layer.

    What is zero in exact arithmetic is compared with the largest of all gradients. And where a batch has results that
    are not finite, only numbers are compared that both have: which elements these spread to is up to kernels.
    """
    largest = max((_largest(each.value) for each in whole.gradients), default=0.0)
    is_finite = all(bool(result.isfinite().all()) for result in whole.results)
    for ours, theirs in zip(gradients, whole.gradients, strict=True):
        if ours.is_there != theirs.is_there:
            return Difference("presence", "gradient", ours.is_there, theirs.is_there, name=ours.name)
        difference = _difference(
            "gradient",
            ours.value if is_finite else torch.where(ours.value.isfinite(), ours.value, theirs.value),
            theirs.value,
            scale=max(largest / 10, _SMALLEST),
            autocast=autocast,
        )
        if difference:
            return replace(difference, name=ours.name)
    return None


def _difference(
    part: Literal["hidden states", "others", "kept", "gradient"],
    ours: Tensor,
    whole: Tensor,
    *,
    scale: float = _SMALLEST,
    autocast: torch.dtype | None = None,
) -> Difference | None:
    """Where `ours` differs from `whole`, of which `scale` is the least that counts as its size.

    Where the whole layer has no numbers, they are not compared: a batch may be one that training goes on after.
    """
    if ours.shape != whole.shape:
        return Difference("shape", part, tuple(ours.shape), tuple(whole.shape))
    if not whole.numel():
        return None
    tolerance = max(_TOLERANCE.get(dtype, _TOLERANCE_OF_HALF) for dtype in (whole.dtype, autocast) if dtype is not None)
    allowed = tolerance * max(_largest(whole), scale)
    errors = (ours - whole).abs().float().nan_to_num(torch.inf, torch.inf)
    errors = torch.where(whole.isfinite(), errors, 0.0)
    error = float(errors.max())
    if error <= allowed:
        return None
    return Difference(
        "numbers", part, tuple(ours.shape), tuple(whole.shape), error=error, allowed=allowed, beyond=errors > allowed
    )


def _largest(values: Tensor) -> float:
    return float(values.abs().nan_to_num(0.0, 0.0, 0.0).max()) if values.numel() else 0.0

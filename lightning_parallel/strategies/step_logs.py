"""Logs of a step on the last stage of a pipeline, combined over microbatches and logged again on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_parallel.errors import ConfigurationError, line_of_user
from lightning_parallel.module.placeholders import Placeholder, placeholders_in
from lightning_parallel.techniques.pipeline.layer_router import LayerRouter
from lightning_parallel.techniques.pipeline.turns import DisorderError

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

_COMBINED = {"mean": "mean", "avg": "mean", "sum": "sum", "max": "max", "amax": "max", "min": "min", "amin": "min"}


@dataclass(frozen=True)
class _MetricRef:
    """A metric of the module, by its path."""

    path: str


@dataclass
class _Call:
    """One call of ``self.log``."""

    microbatch: int
    name: str
    value: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class StepLogs:
    """The calls of ``self.log`` in one step.

    Args:
        module: The module whose calls are taken.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self._calls: list[_Call] = []
        self._pending: list[_Call] = []

    @contextmanager
    def of(self, microbatch: int, look: Callable[[str, Any], None] = lambda name, value: None) -> Iterator[None]:
        """Record calls of ``self.log`` instead of logging them; a stage that leaves the step early has only some.

        Args:
            microbatch: The microbatch.
            look: Called with the name and the value of each.
        """

        def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            look(name, value)
            value = value.detach() if isinstance(value, Tensor) else value
            self._calls.append(_Call(microbatch, name, value, args, kwargs))

        own = self._module.__dict__.get("log")
        self._module.__dict__["log"] = log
        try:
            yield
        finally:
            del self._module.__dict__["log"]
            if own is not None:
                self._module.__dict__["log"] = own

    def placeholders(self) -> list[Placeholder]:
        """Placeholders that were logged: values that only another stage computes."""
        return placeholders_in([call.value for call in self._calls])

    def collected(self) -> list[_Call]:
        """The calls that a step on the whole batch would have made."""
        by_name: dict[tuple[str, int], list[_Call]] = {}
        seen: dict[tuple[str, int], int] = {}
        for call in self._calls:
            occurrence = seen[call.name, call.microbatch] = seen.get((call.name, call.microbatch), -1) + 1
            by_name.setdefault((call.name, occurrence), []).append(call)
        return [self._combined(calls) for calls in by_name.values()]

    def replay(self, calls: Sequence[_Call], device: torch.device) -> None:
        """Call the module's own ``self.log`` with the calls that the last stage collected.

        Args:
            calls: From `collected`.
            device: This rank's device, to which values go.
        """
        for call in calls:
            value = call.value
            if isinstance(value, _MetricRef):
                value = self._module.get_submodule(value.path)
            elif isinstance(value, Tensor):
                value = value.to(device)
            self._module.log(call.name, value, *call.args, **call.kwargs)

    def _combined(self, calls: list[_Call]) -> _Call:
        first = calls[0]
        if isinstance(first.value, Metric):
            return _Call(0, first.name, self._reference(first.value), first.args, first.kwargs)
        sizes = [call.kwargs.get("batch_size") for call in calls]
        kwargs = dict(first.kwargs)
        if all(size is not None for size in sizes):
            kwargs["batch_size"] = sum(sizes)  # type: ignore[arg-type]
        weights = torch.tensor([1.0 if size is None else float(size) for size in sizes], dtype=torch.float64)
        values = torch.stack([torch.as_tensor(call.value).reshape(()).double().cpu() for call in calls])
        how = _combination(first)
        value = (values * weights).sum() / weights.sum() if how == "mean" else getattr(torch, how)(values)
        dtype = first.value.dtype if isinstance(first.value, Tensor) else torch.float32
        value = value.to(dtype if dtype.is_floating_point else torch.float32)
        return _Call(0, first.name, value, first.args, kwargs)

    def _reference(self, metric: Metric) -> _MetricRef:
        path = next((path for path, child in self._module.named_modules() if child is metric), None)
        if path is None:
            raise ConfigurationError(
                ["a metric that is logged is no submodule of the LightningModule; make it an attribute of it"]
            )
        return _MetricRef(path)


def logs_of_trace(module: LightningModule, router: LayerRouter) -> AbstractContextManager[None]:
    """Inside this context, a step that only runs on placeholders is refused if it logs what the last stage lacks.

    Args:
        module: The module.
        router: The router of its layers.
    """

    def look(name: str, value: Any) -> None:
        is_last = router.plan.stage_at(router.position) == router.plan.last
        if is_last or not placeholders_in(value):
            return
        if router.is_in_layer:
            raise ConfigurationError([_IN_LAYER.format(name, line_of_user())])
        raise DisorderError([_BEFORE_THE_END.format(name, line_of_user())])

    return StepLogs(module).of(0, look)


def _combination(call: _Call) -> str:
    """The way in which values of microbatches become one: as Lightning combines those of several batches."""
    position = 6  # of reduce_fx, behind name and value
    given = call.kwargs.get("reduce_fx", call.args[position - 2] if len(call.args) > position - 2 else "mean")
    name = given if isinstance(given, str) else getattr(given, "__name__", "")
    if name.lower() not in _COMBINED:
        raise ConfigurationError(
            [
                f"self.log({call.name!r}, reduce_fx={given!r}) under pipeline > 1: nobody knows how values of "
                "microbatches become one; give 'mean', 'sum', 'max' or 'min'"
            ]
        )
    return _COMBINED[name.lower()]


_IN_LAYER = (
    "self.log({!r}) at {} is called in a layer, or a hook in it, that one pipeline stage runs, and the last one logs; "
    "keep the value in an attribute of the layer, and log that behind the last layer, or give pipeline=1"
)
_BEFORE_THE_END = (
    "self.log({!r}) at {} takes what another pipeline stage than the last one computes, before the last layer; log it "
    "behind that, or give schedule='turns' or pipeline=1"
)

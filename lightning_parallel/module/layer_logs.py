"""Values that layers log, on the ranks that do not run these layers, where stages take turns."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lightning_parallel.errors import check


@dataclass(frozen=True)
class LoggedValue:
    """One call of ``self.log``, which can be sent; a metric cannot."""

    name: str
    value: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    is_metric: bool


class LayerLogs:
    """The calls of ``self.log`` inside of layers, by their code or by hooks on them.

    Args:
        module: The module whose calls they are; it may have no such method.

    Example:
        >>> with logs.taken() as calls:
        ...     result = layer(x)
        >>> logs.repeat(calls)  # on every rank
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    @contextlib.contextmanager
    def taken(self) -> Iterator[list[LoggedValue]]:
        """Inside this context, calls are put into the list that it yields, and log nothing."""
        calls: list[LoggedValue] = []
        own = vars(self._module).get("log")

        def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            is_metric = isinstance(value, nn.Module)
            sent = None if is_metric else value.detach().cpu() if isinstance(value, Tensor) else value
            calls.append(LoggedValue(name, sent, args, kwargs, is_metric))

        if not hasattr(self._module, "log"):
            yield calls
            return
        vars(self._module)["log"] = log
        try:
            yield calls
        finally:
            vars(self._module).pop("log")
            if own is not None:
                vars(self._module)["log"] = own

    def repeat(self, calls: Sequence[LoggedValue]) -> None:
        """Log what has been taken.

        Raises:
            ConfigurationError: For a metric, which only one rank has updated: on all of them.
        """
        check([_METRIC.format(call.name) for call in calls if call.is_metric])
        for call in calls:
            self._module.log(call.name, call.value, *call.args, **call.kwargs)  # type: ignore[operator]


_METRIC = (
    "a layer logs the metric {!r}, which only the pipeline stage that has the layer updates; update and log it in the "
    "step, from what the layer returns"
)

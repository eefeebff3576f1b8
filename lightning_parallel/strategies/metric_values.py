"""Values that metrics return for a batch of which a pipeline gives them one microbatch after the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch.utils.hooks import RemovableHandle
from torchmetrics import Metric
from torchmetrics.wrappers.abstract import WrapperMetric

from lightning_parallel import _lightning


class BatchValues:
    """Updates metrics that a step calls once more, on states of this step only, for the values of the batch.

    Logged by ``self.log(name, metric)``, a metric shows in each step the value that its forward has returned last: that
    of the last microbatch otherwise. Wrappers of metrics are left alone: they may draw random numbers in an update.

    Args:
        metrics: Path -> metric.

    Example:
        >>> values = BatchValues(metrics)
        >>> with values.noted():
        ...     ...  # within `part`, run the step on each microbatch
        >>> values.show()
    """

    def __init__(self, metrics: Mapping[str, Metric]) -> None:
        self._metrics = {path: metric for path, metric in metrics.items() if not isinstance(metric, WrapperMetric)}
        self._states: dict[tuple[str, int], dict[str, Any]] = {}
        self._calls: dict[str, int] = {}
        """The number of calls of each metric in this microbatch: a later one is another one than those before."""
        self._is_paused = False

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note, inside this context, the samples that metrics are given."""
        hooks = [self._hook(path, metric) for path, metric in self._metrics.items()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @contextmanager
    def part(self) -> Iterator[None]:
        """Open it around each microbatch."""
        self._calls = {}
        yield

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside this context, what metrics are given does not count."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def show(self) -> None:
        """Let each metric that was called have returned the value of all microbatches last."""
        for path, count in self._calls.items():
            metric = self._metrics[path]
            with _lightning.metrics.other_states(metric, self._states[path, count]):
                value = metric.compute()
            _lightning.metrics.set_last_value(metric, value)

    def _hook(self, path: str, metric: Metric) -> RemovableHandle:
        def note(_: Metric, args: Any, kwargs: Any, __: Any) -> None:
            if not self._is_paused:
                self._calls[path] = self._calls.get(path, 0) + 1
                key = path, self._calls[path]
                states = self._states.setdefault(key, _lightning.metrics.empty_states(metric))
                with _lightning.metrics.other_states(metric, states):
                    metric.update(*args, **kwargs)

        return metric.register_forward_hook(note, with_kwargs=True)

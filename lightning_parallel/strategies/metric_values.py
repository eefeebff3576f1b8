"""Values that metrics return for a batch of which a pipeline gives them one microbatch after the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch.utils.hooks import RemovableHandle
from torchmetrics import Metric

from lightning_parallel import _lightning


class BatchValues:
    """Updates copies of the metrics that a step calls, by one microbatch after the other, for the values of the batch.

    Logged by ``self.log(name, metric)``, a metric shows in each step the value that its forward has returned last: that
    of the last microbatch otherwise. A copy begins with no samples, and its value is that of this step, on this rank.

    Args:
        metrics: Path -> metric.

    Example:
        >>> values = BatchValues(metrics)
        >>> with values.noted():
        ...     ...  # run the step on each microbatch
        >>> values.show()
    """

    def __init__(self, metrics: Mapping[str, Metric]) -> None:
        self._metrics = metrics
        self._copies: dict[str, Metric] = {}
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
    def paused(self) -> Iterator[None]:
        """Inside this context, what metrics are given does not count."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def show(self) -> None:
        """Let each metric that was called have returned the value of all microbatches last."""
        for path, its_copy in self._copies.items():
            _lightning.metrics.set_last_value(self._metrics[path], its_copy.compute())

    def _hook(self, path: str, metric: Metric) -> RemovableHandle:
        def note(_: Metric, args: Any, kwargs: Any, __: Any) -> None:
            if not self._is_paused:
                if path not in self._copies:
                    self._copies[path] = _lightning.metrics.empty_copy(metric)
                self._copies[path].update(*args, **kwargs)

        return metric.register_forward_hook(note, with_kwargs=True)

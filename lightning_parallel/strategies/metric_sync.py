"""The ranks over which torchmetrics adds up: those that read different samples, so that each sample counts once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torchmetrics import Metric


@contextmanager
def metrics_synced_over(group: dist.ProcessGroup) -> Iterator[None]:
    """Inside this context, metrics without a process group of their own are synced over `group`, not over all ranks.

    The method of the class is replaced, and not an attribute of each metric: metrics may be anywhere, in lists and in
    callbacks, and be made at any time; and one with a process group can be neither copied nor pickled.

    Args:
        group: The ranks that read different samples. Ranks that share these have equal states.
    """
    own = Metric.sync
    Metric.sync = _over(group, own)  # type: ignore[method-assign]
    try:
        yield
    finally:
        Metric.sync = own  # type: ignore[method-assign]


def _over(group: dist.ProcessGroup, own: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(own)
    def sync(
        metric: Metric,
        dist_sync_fn: Callable[..., Any] | None = None,
        process_group: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        return own(metric, dist_sync_fn, process_group or metric.process_group or group, *args, **kwargs)

    return sync

"""The ranks over which torchmetrics adds up: those that read different samples, so that each sample counts once."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn
from torchmetrics import Metric

from lightning_parallel.module.differences import first_of

_Sync = Callable[..., None]

_told: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_left: dict[int, tuple[weakref.ref[Metric], int, dist.ProcessGroup]] = {}
"""By its id, each metric of a run that has ended, with its number of updates then, and the ranks to sync it over."""


@contextmanager
def metrics_synced_over(group: dist.ProcessGroup, held: Callable[[], Iterable[Metric]] = tuple) -> Iterator[None]:
    """Inside this context, metrics without a process group of their own are synced over `group`, not over all ranks.

    Afterwards this still holds for those that are `held`, until they are updated again: a script may ask what a run has
    counted when it is over.

    The method of the class is replaced, and not an attribute of each metric: metrics may be anywhere, in lists and in
    callbacks, and be made at any time; and one with a process group can be neither copied nor pickled.

    Args:
        group: The ranks that read different samples. Ranks that share these have equal states.
        held: Returns the metrics of the run.
    """
    own = Metric.sync
    Metric.sync = _over(lambda metric: group, own)  # type: ignore[method-assign]
    try:
        yield
    finally:
        Metric.sync = own  # type: ignore[method-assign]
        for metric in held():
            _leave(metric, group)


def tell_kept_states(module: nn.Module, num_readers: int) -> None:
    """Say once which metrics a checkpoint keeps: it has what rank 0 has counted, and all ranks go on from that.

    Args:
        module: The module.
        num_readers: The ranks that read different samples.
    """
    kept = [path for path, child in module.named_modules() if isinstance(child, Metric) and _is_kept(child)]
    if num_readers > 1 and kept and module not in _told:
        _told.add(module)
        rank_zero_info(_KEPT.format(first_of(kept), num_readers))


def _is_kept(metric: Metric) -> bool:
    return metric.update_called and bool(set(metric.metric_state) & set(metric.state_dict()))


def _leave(metric: Metric, group: dist.ProcessGroup) -> None:
    _sync_what_is_left()
    number = id(metric)
    _left[number] = weakref.ref(metric, lambda _: _left.pop(number, None)), metric.update_count, group


@functools.cache
def _sync_what_is_left() -> None:
    """Let metrics of runs that have ended be synced over their ranks, once and for good."""
    Metric.sync = _over(_group_of, Metric.sync)  # type: ignore[method-assign]


def _group_of(metric: Metric) -> dist.ProcessGroup | None:
    """The ranks over which a metric is to be synced behind a run; ``None`` for all, as torchmetrics does."""
    known, num_updates, group = _left.get(id(metric), (None, 0, None))
    if known is None or known() is not metric or metric.update_count != num_updates or not dist.is_initialized():
        return None
    return group


def _over(group_of: Callable[[Metric], dist.ProcessGroup | None], own: _Sync) -> _Sync:
    @functools.wraps(own)
    def sync(
        metric: Metric,
        dist_sync_fn: Callable[..., Any] | None = None,
        process_group: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        return own(metric, dist_sync_fn, process_group or metric.process_group or group_of(metric), *args, **kwargs)

    return sync


_KEPT = (
    "the checkpoint keeps the states of {} as the first of the {} ranks that read different samples has counted them "
    "(persistent=True): a run that goes on from it begins on each rank with these, and what other ranks have counted "
    "is lost. Leave persistent out, or save metric.compute() in on_save_checkpoint"
)

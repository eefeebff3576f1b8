"""Refusal of collectives that would wait for ranks which do not come.

Stages of a pipeline run a step at different times, and a rank that has no batch left runs none.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed import ProcessGroup

from lightning_parallel import _torch
from lightning_parallel.errors import ConfigurationError, line_of_user
from lightning_parallel.ranks.host_reads import at

_MEETINGS = ("barrier", "broadcast", "reduce_boolean_decision")
"""Methods of strategies in which all ranks meet."""


def refusing_meetings(
    step: Callable[..., Any], strategy_of: Callable[[], Any], stages: ProcessGroup
) -> Callable[..., Any]:
    """`step`, in which calls that wait for other stages are refused: a stage waits there for a stage that waits for it.

    Args:
        step: A step method of the module.
        strategy_of: Returns the strategy.
        stages: The ranks that hold the stages, this one among them.
    """

    @functools.cache
    def is_between_stages(group: ProcessGroup | None) -> bool:
        others = set(dist.get_process_group_ranks(stages)) - {dist.get_rank()}
        return not others.isdisjoint(dist.get_process_group_ranks(group))

    def check(name: str, group: ProcessGroup | None, op: object) -> None:
        if is_between_stages(group):
            _refuse(f"torch.distributed.{name}")

    @functools.wraps(step)
    def stepped(*args: Any, **kwargs: Any) -> Any:
        own = vars(strategy_of())
        before = {name: own[name] for name in _MEETINGS if name in own}
        own.update({name: functools.partial(_refuse, f"strategy.{name}") for name in _MEETINGS})
        try:
            with _torch.groups.collectives_checked(check):
                return step(*args, **kwargs)
        finally:
            for name in _MEETINGS:
                del own[name]
            own.update(before)

    return stepped


def _refuse(name: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise ConfigurationError(
        [
            f"{name}() {at(line_of_user())} waits for all ranks inside of a step, but stages of a pipeline run a step "
            "at different times, each for one microbatch: they would wait for each other for ever. Call it in a hook, "
            "such as on_train_batch_start; self.log(sync_dist=True) and self.all_gather, which ask the ranks that read "
            "other samples, work in a step; or give schedule='turns' or pipeline=1"
        ]
    )


@contextmanager
def meetings_refused(without: str) -> Iterator[None]:
    """Inside this context, collectives that user code asks for are refused: some ranks would not come, or with nothing.

    Args:
        without: The ranks that have no batch left, in words.
    """

    def check(name: str, group: ProcessGroup | None, op: object) -> None:
        if _is_asked_for():
            raise ConfigurationError([_WITHOUT.format(name=name, at=at(line_of_user()), without=without)])

    with _torch.groups.collectives_checked(check):
        yield


def _is_asked_for() -> bool:
    """Whether the collective that begins is one of the user's, a metric's or a log's, and none that runs the module."""
    name = module_that_asks()
    return name.startswith(_ASKED) or not name.startswith(("torch.", "lightning_parallel."))


def module_that_asks() -> str:
    """The name of the module that calls the collective which begins, itself or through functions made for that."""
    frame = inspect.currentframe()
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if not name.startswith(_PASSING_ON):
            return name
        frame = frame.f_back
    return "torch."  # a thread of torch's own


_PASSING_ON = (
    __name__,
    "lightning_parallel.strategies.shared_sums",
    "contextlib",
    "functools",
    "lightning_parallel._",
    "lightning_parallel.ranks.",
    "torch._dynamo.",
    "torch.autograd.",
    "torch.distributed.c10d_logger",
    "torch.distributed.distributed_c10d",
    "torch.distributed.nn",
    "torch.utils._contextlib",
)
"""Modules whose collectives are those of whoever calls them."""
_ASKED = "lightning_parallel.strategies.process_group"
"""Collectives of the strategy, which logs and user code call."""
_WITHOUT = (
    "{name}() {at} waits for all ranks, but there is no batch left for {without}. Collect values of "
    "steps in a metric of torchmetrics or by self.log(..., on_epoch=True, sync_dist=True), whose ranks meet at the end "
    "of the epoch, and leave out on_step=True; or give every rank as many batches"
)

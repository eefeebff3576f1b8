"""Refusal of collectives between stages inside of a step, which stages of a pipeline run at different times."""

from __future__ import annotations

import functools
from collections.abc import Callable
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

    def check(name: str, group: ProcessGroup | None) -> None:
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
            "other samples, work in a step; or give pipeline=1"
        ]
    )

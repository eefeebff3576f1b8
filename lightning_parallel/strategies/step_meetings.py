"""Refusal of collectives of all ranks inside a step that stages of a pipeline run at different times."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

from lightning_parallel.errors import ConfigurationError, line_of_user
from lightning_parallel.ranks.host_reads import at

_MEETINGS = ("barrier", "broadcast", "reduce_boolean_decision")
"""Methods of strategies in which all ranks meet."""


def refusing_meetings(step: Callable[..., Any], strategy_of: Callable[[], Any]) -> Callable[..., Any]:
    """`step`, in which calls that wait for all ranks are refused: a stage waits there for a stage that waits for it.

    Args:
        step: A step method of the module.
        strategy_of: Returns the strategy.
    """

    @functools.wraps(step)
    def stepped(*args: Any, **kwargs: Any) -> Any:
        own = vars(strategy_of())
        before = {name: own[name] for name in _MEETINGS if name in own}
        own.update({name: functools.partial(_refuse, name) for name in _MEETINGS})
        try:
            return step(*args, **kwargs)
        finally:
            for name in _MEETINGS:
                del own[name]
            own.update(before)

    return stepped


def _refuse(name: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise ConfigurationError(
        [
            f"strategy.{name}() {at(line_of_user())} waits for all ranks inside of a step, but stages of a pipeline "
            "run a step at different times, each for one microbatch: they would wait for each other for ever. Call it "
            "in a hook, such as on_train_batch_start, or give pipeline=1"
        ]
    )

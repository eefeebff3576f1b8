"""Ranks are started: the script once more for each, or functions in processes of their own, as a notebook needs."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from lightning_parallel import _lightning
from lightning_parallel.strategies.planned_strategy import PlannedStrategy

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

_SCRIPT = "popen"


@dataclass(frozen=True)
class RankOptions:
    """The way in which ranks are started and joined.

    Args:
        backend: Of the process group: ``"nccl"``, ``"gloo"``...; by default what fits the device.
        timeout: How long a collective waits for a rank that is missing; seconds or a timedelta.
        start_method: ``"popen"``, or a method of `multiprocessing`.
        hang_timeout: How long all may wait for ranks that do not move before the run is ended; 0 or ``None``: for ever.
    """

    backend: str | None
    timeout: timedelta | float
    start_method: str
    hang_timeout: timedelta | float | None

    @property
    def hang_seconds(self) -> float:
        """Seconds of `hang_timeout`; 0 if nobody is to watch."""
        given = self.hang_timeout or 0.0
        return given.total_seconds() if isinstance(given, timedelta) else given

    @property
    def violations(self) -> list[str]:
        """The reasons why values are none, in words."""
        if self.hang_seconds >= 0:
            return []
        return [f"hang_timeout={self.hang_timeout} is no time; give seconds above 0, or 0 to wait for ever"]


def start_violations(start_method: str, *, num_ranks: int, strategy: PlannedStrategy) -> list[str]:
    """Reasons why ranks cannot be started in this way, here.

    Args:
        start_method: As given.
        num_ranks: Devices times nodes.
        strategy: Whose ranks they are.
    """
    possible = (_SCRIPT, *multiprocessing.get_all_start_methods())
    if start_method not in possible:
        return [f"start_method={start_method!r} is unknown here; possible: {', '.join(possible)}"]
    environment = strategy.cluster_environment
    is_external = environment is not None and environment.creates_processes_externally
    if is_interactive() and num_ranks > 1 and start_method != "fork" and not is_external:
        return [
            f"start_method={start_method!r} starts {num_ranks} ranks by running a script, and a notebook or an "
            "interactive session has none; give start_method='fork', or devices=1"
        ]
    return []


def is_interactive() -> bool:
    """Whether this is a notebook or an interactive session."""
    return hasattr(sys, "ps1")


def build_launcher(strategy: PlannedStrategy, start_method: str) -> Any:
    """Build what starts the ranks of `strategy`; a single rank is this process, however it would be started.

    Args:
        strategy: Whose devices and machines are known.
        start_method: ``"popen"``, or a method of `multiprocessing`.
    """
    environment = strategy.cluster_environment
    assert environment is not None
    if start_method == _SCRIPT or strategy.num_nodes * strategy.num_processes == 1:
        return _ScriptLauncher(strategy, environment, strategy.num_processes, strategy.num_nodes)
    return _FunctionLauncher(strategy, strategy, start_method=start_method)


class _Checking:
    """A launcher that checks the module before any process starts.

    Args:
        checked: The strategy.
        args: Of the launcher itself.
        kwargs: Likewise.
    """

    def __init__(self, checked: PlannedStrategy, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._checked = checked

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Start processes, and call `function` in each.

        Args:
            function: What to call.
            args: Its arguments.
            trainer: If there is one.
            kwargs: As `args`.
        """
        module = self._checked.lightning_module
        if module is not None:
            if trainer is not None:
                module.trainer = trainer  # Lightning does so after the launch; some refusals look at its settings
            self._checked.check_module(module)
        return super().launch(function, *args, trainer=trainer, **kwargs)  # type: ignore[misc]


class _ScriptLauncher(_Checking, _lightning.SubprocessLauncher):
    """Runs the script once more for each further rank."""

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        return bool(self.num_processes * self.num_nodes == 1)


class _FunctionLauncher(_Checking, _lightning.ProcessLauncher):
    """Runs functions in processes of their own; weights, metrics and results come back to this one."""

    @override
    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return super().launch(_Telling(function, self._checked), *args, **kwargs)


@dataclass(frozen=True)
class _Telling:
    """A function of a rank whose error the strategy is told in that process: Lightning only tells the one that waits.

    Args:
        function: What the rank calls.
        strategy: That of the rank, once both have been sent to it.
    """

    function: Callable[..., Any]
    strategy: PlannedStrategy

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.function(*args, **kwargs)
        except Exception as error:
            self.strategy.on_exception(error)
            raise

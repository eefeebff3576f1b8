"""A pytest plugin for Lightning's tests: another strategy in the place of `Trainer`'s default one, outcomes in a file.

``pytest -p tests.lightning_suite.plugin --in-place-of-default=fsdp_custom --outcomes=FILE PATHS`` in a checkout of
Lightning. Where a test names a strategy itself, it has that one; but with ``--start-ranks``, for tests that start some,
the strategy takes the place of Lightning's DDP, too.
"""

from __future__ import annotations

import faulthandler
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector

from lightning_parallel.presets import PRESETS, build_strategy
from tests.lightning_suite import several_ranks

DEADLINE = 90
"""Seconds after which a test ends the process with its stack: it waits for a rank that nobody has started."""
PERIOD = 0.02
LONGEST = 1200
"""Characters of an error."""
RUNNING, SEVERITY = "running", ("passed", "skipped", "xfailed", "failed")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("lightning-parallel")
    group.addoption("--in-place-of-default", required=True, help="a name of ours, or one of Lightning's, such as ddp")
    group.addoption("--outcomes", type=Path, required=True, help="a line of JSON is added to this file for each test")
    group.addoption("--start-ranks", action="store_true", help="run tests that start ranks, which are skipped if not")


def pytest_configure(config: pytest.Config) -> None:
    # Of pytest-rerunfailures, which is not needed: such a test runs once.
    config.addinivalue_line("markers", "flaky: may fail now and then")
    name, outcomes = config.getoption("--in-place-of-default"), config.getoption("--outcomes")
    errors = outcomes.with_suffix(".errors")
    # Lightning's tests wait for this thread, which looks at child processes in each period.
    _ChildProcessObserver.__init__.__defaults__ = (PERIOD,)
    _AcceleratorConnector._choose_strategy = lambda self: strategy_named(name)
    if config.getoption("--start-ranks"):
        options = [each for each in config.invocation_params.args if each not in config.args]
        several_ranks.start_ranks(options, lambda method, its: strategy_named(name, method) if is_ours(name) else its)
        is_further = several_ranks.is_further_rank()
        config.pluginmanager.register(
            OfFurtherRank(errors) if is_further else Outcomes(outcomes, errors, several_ranks.DEADLINE)
        )
    else:
        config.pluginmanager.register(Outcomes(outcomes, errors, DEADLINE))
        _SubprocessScriptLauncher._call_children_scripts = start_none
        _MultiProcessingLauncher.launch = skip


def start_none(launcher: Any) -> None:
    """One rank needs no further process; for several ranks, pytest would be started once more for each."""
    if launcher.num_processes * launcher.num_nodes > 1:
        skip()


def skip(*args: Any, **kwargs: Any) -> None:
    """Skip a test that starts processes: it has named the strategy, one of Lightning's, or needs several ranks."""
    pytest.skip("starts processes")


def strategy_named(name: str, start_method: str | None = None) -> Any:
    """A new strategy where the name is ours: each Trainer has its own."""
    if not is_ours(name):
        return name
    return build_strategy(name if start_method is None else f"{name}{',' if ':' in name else ':'}{start_method=!s}")


def is_ours(name: str) -> bool:
    return name.partition(":")[0] in PRESETS


class Outcomes:
    """Notes each test twice: when it begins, so that one which takes the process with it is known, and as it ended."""

    def __init__(self, file: Path, errors: Path, deadline: int) -> None:
        self.file, self.errors, self.deadline = file, errors, deadline
        lines = map(json.loads, file.read_text().splitlines() if file.exists() else ())
        self.done = {test for test, outcome, _ in lines if outcome != RUNNING}
        self.outcome, self.error = "", ""

    def note(self, test: str, outcome: str, error: str = "") -> None:
        with self.file.open("a") as file:
            file.write(json.dumps([test, outcome, error]) + "\n")

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid not in self.done]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.outcome, self.error = SEVERITY[0], ""
        self.note(item.nodeid, RUNNING)
        several_ranks.current.append(item.nodeid)
        # In a file: pytest has what is printed, and goes with the process.
        with self.errors.open("w") as stacks:
            faulthandler.dump_traceback_later(self.deadline, exit=True, file=stacks)
            result = yield
            faulthandler.cancel_dump_traceback_later()
        if elsewhere := several_ranks.ended(self.errors):
            self.outcome, self.error = SEVERITY[-1], self.error or elsewhere
        self.note(item.nodeid, self.outcome, self.error)
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        outcome = "xfailed" if report.skipped and hasattr(report, "wasxfail") else report.outcome
        self.outcome = max(self.outcome, outcome, key=SEVERITY.index)
        if report.failed and not self.error:
            self.error = error_of(report)


class OfFurtherRank:
    """Notes what fails in a rank that a test has started, for the first rank, which notes outcomes."""

    def __init__(self, errors: Path) -> None:
        self.errors = errors

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        faulthandler.dump_traceback_later(several_ranks.DEADLINE, exit=True)
        result = yield
        faulthandler.cancel_dump_traceback_later()
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.errors.write_text(error_of(report))


def error_of(report: pytest.TestReport) -> str:
    """What failed, in the words of its exception."""
    crash = getattr(report.longrepr, "reprcrash", None)
    message = str(getattr(crash, "message", report.longrepr))
    # Of a rank's traceback, the end says what is wrong.
    return message if len(message) <= LONGEST else f"{message[: LONGEST // 4]} ... {message[-LONGEST * 3 // 4 :]}"

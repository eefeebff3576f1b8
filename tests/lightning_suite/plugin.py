"""A pytest plugin for Lightning's tests: another strategy in the place of `Trainer`'s default one, outcomes in a file.

``pytest -p tests.lightning_suite.plugin --in-place-of-default=fsdp_custom --outcomes=FILE PATHS`` in a checkout of
Lightning. Where a test names a strategy itself, it has that one.
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

DEADLINE = 90
"""Seconds after which a test ends the process with its stack: it waits for a rank that nobody has started."""
PERIOD = 0.02
RUNNING, SEVERITY = "running", ("passed", "skipped", "xfailed", "failed")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("lightning-parallel")
    group.addoption("--in-place-of-default", required=True, help="a name of ours, or one of Lightning's, such as ddp")
    group.addoption("--outcomes", type=Path, required=True, help="a line of JSON is added to this file for each test")


def pytest_configure(config: pytest.Config) -> None:
    # Of pytest-rerunfailures, which is not needed: such a test runs once.
    config.addinivalue_line("markers", "flaky: may fail now and then")
    name = config.getoption("--in-place-of-default")
    config.pluginmanager.register(Outcomes(config.getoption("--outcomes")))
    # Lightning's tests wait for this thread, which looks at child processes, of which there are none, in each period.
    _ChildProcessObserver.__init__.__defaults__ = (PERIOD,)
    _SubprocessScriptLauncher._call_children_scripts = start_none
    _MultiProcessingLauncher.launch = skip
    _AcceleratorConnector._choose_strategy = lambda self: strategy_named(name)


def start_none(launcher: Any) -> None:
    """One rank needs no further process; for several ranks, pytest would be started once more for each."""
    if launcher.num_processes * launcher.num_nodes > 1:
        skip()


def skip(*args: Any, **kwargs: Any) -> None:
    """Skip a test that starts processes: it has named the strategy, one of Lightning's, or needs several ranks."""
    pytest.skip("starts processes")


def strategy_named(name: str) -> Any:
    """A new strategy where the name is ours: each Trainer has its own."""
    return build_strategy(name) if name.partition(":")[0] in PRESETS else name


class Outcomes:
    """Notes each test twice: when it begins, so that one which takes the process with it is known, and as it ended."""

    def __init__(self, file: Path) -> None:
        self.file = file
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
        faulthandler.dump_traceback_later(DEADLINE, exit=True)
        result = yield
        faulthandler.cancel_dump_traceback_later()
        self.note(item.nodeid, self.outcome, self.error)
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        outcome = "xfailed" if report.skipped and hasattr(report, "wasxfail") else report.outcome
        self.outcome = max(self.outcome, outcome, key=SEVERITY.index)
        if report.failed and not self.error:
            crash = getattr(report.longrepr, "reprcrash", None)
            self.error = str(getattr(crash, "message", report.longrepr))[:1000]

"""The rank pools and what every test process sets."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher

from tests.cells import left_out, share
from tests.compiler import keep_to_graphs
from tests.parity import PARITY
from tests.quiet import KNOWN, look_for_plugins_once
from tests.rank_pool import RankPool, start_servers


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cells", metavar="K/N", help="of tests that take their time, the Kth of N shares of their cells")


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)
    look_for_plugins_once()
    keep_to_graphs()
    for message in KNOWN:
        config.addinivalue_line("filterwarnings", f"ignore:{message}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The largest difference to one process of each module under each name, as tests recorded it."""
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.stats.get(kind, ())]
    table = dict(value for report in reports for key, value in report.user_properties if key == PARITY)
    if not table:
        return
    names = list(dict.fromkeys(name for _, name in table))
    terminalreporter.section("largest difference to one process (SGD and AdamW, 5 steps, fp32)")
    terminalreporter.line(" ".join([f"{'':18}", *(f"{name:>20}" for name in names)]))
    for case in dict.fromkeys(case for case, _ in table):
        cells = (f"{table.get((case, name), '-'):>20}" for name in names)
        terminalreporter.line(" ".join([f"{case:18}", *cells]))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A test that needs no ranks is fast, unless it says that it is slow; tests of ranks may say that they are fast.

    What a new version of torch has no more is said first, in words, and not by a hundred tests that need it.
    """
    items.sort(key=lambda item: item.path.name != "test_private_names.py")
    for item in items:
        if not needs_ranks(item) and item.get_closest_marker("slow") is None:
            item.add_marker("fast")
    if chosen := config.getoption("cells"):
        others = set(left_out(items, share(chosen)))
        config.hook.pytest_deselected(items=list(others))
        items[:] = [item for item in items if item not in others]


def pytest_collection_finish() -> None:
    """What has been imported stays: Lightning collects garbage at the end of each fit, which went through all of it."""
    gc.collect()
    gc.freeze()


def needs_ranks(item: pytest.Item) -> bool:
    return "ranks" in getattr(item, "fixturenames", ())


@pytest.fixture(scope="session", autouse=True)
def _servers(request: pytest.FixtureRequest) -> None:
    """Servers of ranks import in the background, if any test needs ranks."""
    if any(needs_ranks(item) for item in request.session.items):
        start_servers()


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], RankPool]]:
    """``ranks(2)``: a pool of two ranks, started at the first use and again if a test made it hang."""
    pools: dict[int, RankPool] = {}

    def pool_of(size: int) -> RankPool:
        for other in [other for other, pool in pools.items() if pool.is_crowded or (other != size and pool.is_idle)]:
            pools.pop(other).close()
        if size not in pools or not pools[size].is_alive:
            pools[size] = RankPool(size, tmp_path_factory.mktemp(f"ranks{size}"))
        return pools[size]

    yield pool_of
    for pool in pools.values():
        pool.close()


@pytest.fixture(autouse=True)
def _no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal that comes too late starts pytest a second time, and Lightning kills the first when that one fails."""

    def refuse(self: Any) -> None:
        if self.num_processes > 1:
            pytest.fail("the launcher was about to start this test session again: it has to be refused before")

    monkeypatch.setattr(_SubprocessScriptLauncher, "_call_children_scripts", refuse)


@pytest.fixture(autouse=True)
def _no_group_left() -> Iterator[None]:
    """A test that fits in this process leaves a group of one rank, to which others would be refused to belong."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture(autouse=True)
def _no_environment_left() -> Iterator[None]:
    """A fit in this process notes seeds and addresses there, which processes that later tests start would read."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a test writes, it writes elsewhere."""
    monkeypatch.chdir(tmp_path)

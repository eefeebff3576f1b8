"""Runs that are killed at random moments end as if nobody had: in CI a few times, by `tests.stress_kills` often."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.stress_kills import Killer


@pytest.mark.slow
@pytest.mark.parametrize(("name", "seed"), [("ddp_custom", 4), ("fsdp_custom:checkpoint=sharded", 2)])
def test_a_run_that_is_killed_again_and_again(name: str, seed: int, tmp_path: Path) -> None:
    report = Killer(tmp_path, name, 4, seed).run()
    assert report.problems == []
    assert sum(report.kinds.values()) == 4
    assert report.kinds["in a save"] >= 1

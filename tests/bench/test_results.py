"""Made-up results as a table, as JSON, as a picture; and what a bench goes on from."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from lightning_parallel.bench import picture
from lightning_parallel.bench.cells import WEAK, Run
from lightning_parallel.bench.machine import digests, machine, versions
from lightning_parallel.bench.processes import ENDED, RAN, Ending
from lightning_parallel.bench.progress import Progress, in_words
from lightning_parallel.bench.published import PUBLISHED
from lightning_parallel.bench.results import Results, result_of
from lightning_parallel.bench.summary import Summary
from lightning_parallel.bench.table import as_markdown, as_text
from lightning_parallel.errors import ConfigurationError
from tests.bench.made_up import CELLS, REASON, rank, result, results

FIXED = {"steps": {"timed": 20}, "versions": {"torch": "2.13.0"}}


@pytest.fixture
def kept(tmp_path: Path) -> Results:
    found = Results(tmp_path / "bench.json", FIXED)
    for each in results():
        found.add(each)
    return found


def test_medians_spread_and_efficiency(kept: Results) -> None:
    found = {(each.cell.row, each.cell.devices, each.cell.scaling): each for each in kept.summaries(CELLS)}
    weak, strong = found["fast", 2, WEAK], found["fast", 2, "strong"]
    assert (weak.seconds, weak.fastest, weak.slowest, weak.repeats) == (pytest.approx(1.1), 1.0, 1.2, 3)
    assert (weak.samples, weak.samples_per_second) == (20, pytest.approx(20 / 1.1))
    assert weak.efficiency == strong.efficiency == pytest.approx(1.0)
    assert found["slow", 2, WEAK].efficiency == found["slow", 2, "strong"].efficiency == pytest.approx(0.5)
    assert found["never", 2, WEAK].outcome == "refused"
    assert found["never", 2, WEAK].efficiency is None
    assert weak.collectives == {"all-reduce": [2, 200]}  # of the rank that sends most
    assert weak.memory_bytes == 2**20


def test_the_slowest_rank_counts() -> None:
    ending = Ending(RAN, ranks=[rank(1.0, 20), rank(3.0, 20), rank(2.0, 20)])
    assert result_of(Run(CELLS[0], 0), ending).seconds == 3.0


def test_the_table(kept: Results) -> None:
    text = as_text(kept.summaries(CELLS))
    lines = text.splitlines()
    assert lines[0] == "1 device, 10 samples a step"
    assert sum("refused (1)" in line for line in lines) == 2  # one reason, and both cells have its number
    assert text.endswith(f"(1) {REASON}")
    weak = lines.index("2 devices, the same batch a device (weak scaling), 20 samples a step")
    assert lines[weak + 2].split() == [
        "fast",
        "1100.0",
        "1000.0",
        "to",
        "1200.0",
        "18.2",
        "582",
        "1",
        "2",
        "0.00",
        "100%",
    ]
    assert max(map(len, lines)) <= 118
    markdown = as_markdown(kept.summaries(CELLS))
    assert "| `fast` | 1100.0 | 1000.0 to 1200.0 | 18.2 | 582 | 1 | 2 | 0.00 | 100% |" in markdown
    assert markdown.count("refused (1)") == 2


def test_what_was_not_counted_or_is_no_text_is_left_open() -> None:
    found = Results(Path("bench.json"), FIXED)
    without = {**rank(1.0, 10, tokens=None), "collectives": None}
    found.add(result_of(Run(CELLS[0], 0), Ending(RAN, "RuntimeError: no such mode", ranks=[without])))
    (line,) = (line.split() for line in as_text(found.summaries(CELLS[:1])).splitlines() if line.startswith("fast"))
    assert line == ["fast", "1000.0", "1000.0", "to", "1000.0", "10", "1", "?", "(1)", "100%"]


def test_json(kept: Results, tmp_path: Path) -> None:
    kept.save(CELLS)
    found = json.loads((tmp_path / "bench.json").read_text())
    assert set(found) == {"format", "arguments", "fixed", "cells", "runs"}
    assert found["fixed"] == FIXED
    names = (
        "row devices batches repeat outcome reason day seconds samples tokens memory_bytes is_memory_of_steps "
        "collectives"
    )
    assert all(set(run) == set(names.split()) for run in found["runs"])
    assert len(found["runs"]) == 3 * 7 + 2
    of_cell = (
        "row devices scaling batches outcome reason repeats seconds fastest slowest samples samples_per_second "
        "tokens_per_second memory_bytes collectives efficiency"
    )
    assert all(set(cell) == set(of_cell.split()) for cell in found["cells"])
    assert [Summary.of_plain(cell) for cell in found["cells"]] == kept.summaries(CELLS)


def test_finished_runs_are_taken_up_and_failed_ones_tried_again(kept: Results, tmp_path: Path) -> None:
    failing = CELLS[0]
    kept.add(result_of(Run(failing, 3), Ending(ENDED, "the run did not end")))
    kept.save(CELLS)
    again = Results(tmp_path / "bench.json", FIXED)
    again.load()
    assert again.has(Run(failing, 2))
    assert not again.has(Run(failing, 3))
    refused = next(cell for cell in CELLS if cell.row == "never" and cell.devices == 2)
    assert again.has(Run(refused, 2))  # what can't run is tried once
    assert kept.has(Run(failing, 4))  # nor is what ended with an error, in the same bench


def test_weak_and_strong_share_what_is_the_same(tmp_path: Path) -> None:
    """A bench on 2 devices that is continued on 1 and 2."""
    found = Results(tmp_path / "bench.json", FIXED)
    weak = next(cell for cell in CELLS if cell.scaling == WEAK)
    found.add(result(weak, 0, 1.0))
    on_two_alone = [cell for cell in CELLS if (cell.row, cell.devices, cell.batches) == (weak.row, 2, 2)]
    assert all(found.has(Run(cell, 0)) for cell in on_two_alone)


def test_results_of_another_set_up_are_refused(kept: Results, tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    kept.save(CELLS)
    with pytest.raises(ConfigurationError, match=r"versions.torch: 2.13.0 before, 2.14.0 now.*another --output"):
        Results(path, {**FIXED, "versions": {"torch": "2.14.0"}}).load()
    for text in ("{", "{}", "[]", json.dumps({"format": 99, "fixed": FIXED, "runs": []})):
        path.write_text(text)
        with pytest.raises(ConfigurationError, match="is no result of bench"):
            Results(path, FIXED).load()
        assert path.read_text() == text


def test_machine_and_versions_name_no_place(tmp_path: Path) -> None:
    assert {"torch", "lightning", "lightning_parallel", "python"} <= set(versions())
    assert machine()["cores"] >= 1
    config = tmp_path / "recipe.yaml"
    config.write_text("a: 1")
    assert list(digests(["--config", str(config), "--x=1"])) == [str(config)] == list(digests([f"--config={config}"]))


def test_progress_says_what_runs_and_how_long_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 100.0, 104.0, 104.0])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    runs, stream = [Run(CELLS[0], repeat) for repeat in range(3)], io.StringIO()
    with Progress(3, stream) as progress:
        for number in range(2):
            progress.begin(runs[number], number, runs[number:])
            progress.end(runs[number])
        progress.begin(runs[2], 2, runs[2:])
    assert stream.getvalue().splitlines() == [
        "[1/3] fast on 1 device, repeat 1 of 3",
        "[2/3] fast on 1 device, repeat 2 of 3",  # the first one tells nothing of the next
        "[3/3] fast on 1 device, repeat 3 of 3; about 4 s left",
    ]
    assert in_words(300) == "about 5 min"


def test_the_picture(kept: Results, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    files = [tmp_path / "bench.svg", tmp_path / "bench.png"]
    picture.draw(kept.summaries(CELLS), files)
    text = files[0].read_text()
    for words in (
        "fast",
        "slow",
        "weak scaling",
        "strong scaling",
        "2 devices (dashed: ideal)",
        "measured here",
        PUBLISHED[0].name,
    ):
        assert f">{words}" in text, words
    assert files[1].stat().st_size > 1000
    before = text
    picture.draw(kept.summaries(CELLS), files[:1])
    assert files[0].read_text() == before  # a committed picture changes with its figures only


def test_published_curves_begin_at_one() -> None:
    for curve in PUBLISHED:
        points = curve.efficiencies
        assert points[1] == 1
        assert len(points) > 2
        assert all(share < 1.01 for share in points.values()), curve


def test_the_bar_of_a_single_repeat_has_no_length() -> None:
    for number in range(1, 300):
        seconds = number / 7
        single = Summary(CELLS[0], RAN, seconds=seconds, fastest=seconds, slowest=seconds)
        assert picture._ends(single, number / 3) == (0, 0)

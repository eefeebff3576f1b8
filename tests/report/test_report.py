"""The command ``report``: what loggers have written comes back, in a page that is complete in itself."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lightning_parallel import ConfigurationError
from lightning_parallel.callbacks import StepBreakdown, Throughput
from lightning_parallel.cli.report import report
from lightning_parallel.report.charts import Line, area_chart, line_chart, share_bars
from lightning_parallel.report.event_files import read_scalars
from lightning_parallel.report.page import build_page
from lightning_parallel.report.panels import sections_of
from lightning_parallel.report.runs import Run, Series, read_runs
from lightning_parallel.report.scales import bounds, in_words, thinned, ticks
from tests.data import loader
from tests.models.cases import ByteGPT
from tests.parity import trainer_for

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
VOID = ("meta", "br")


class Page(HTMLParser):
    """Counts elements, and finds what a page would load from elsewhere, and elements that are not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.outside: list[str] = []
        self.open: list[str] = []
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags[tag] += 1
        self.outside += [f"{name}={value}" for name, value in attrs if name in ("src", "href") or name[:2] == "on"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.tags[tag] += 1

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data + "\n"


def logged(logger: Any, pace: float) -> None:
    for step in range(0, 100, 5):
        logger.log_metrics({"train_loss": math.nan if step == 50 else 4 * math.exp(-step * pace / 50)}, step=step)
        logger.log_metrics({"throughput/samples_per_sec": 1000 * pace, "throughput/mfu": 0.25 * pace}, step=step)
        logger.log_metrics({"breakdown/forward": 0.25, "breakdown/backward": 0.5, "breakdown/data": 0.25}, step=step)
        logger.log_metrics({"breakdown/step_seconds": 0.5 / pace, "memory/peak_gib": 2.0 + step / 100}, step=step)
        logger.log_metrics({f"monitor/rank{rank}/utilization": 90.0 - rank for rank in range(2)}, step=step)
        logger.log_metrics({"<b>lr</b>": 0.1}, step=step)
    logger.finalize("success")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs, one by each logger."""
    root = tmp_path_factory.mktemp("runs")
    logged(CSVLogger(root, name="", version="slow"), 1.0)
    logged(TensorBoardLogger(root, name="", version="fast"), 2.0)
    return root


def test_both_loggers_say_the_same(folder: Path) -> None:
    fast, slow = read_runs([folder])
    assert (fast.name, slow.name) == ("fast", "slow")
    assert set(fast.series) == set(slow.series)
    assert fast.series["memory/peak_gib"].values == pytest.approx(slow.series["memory/peak_gib"].values)
    assert fast.series["train_loss"].steps == slow.series["train_loss"].steps == tuple(range(0, 100, 5))
    for run in (fast, slow):
        assert math.isnan(run.series["train_loss"].values[10])
        assert len(run.series["train_loss"].finite) == 19


def test_event_files_as_tensorboard_reads_them(folder: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    (path,) = (folder / "fast").glob("events.out.*")
    theirs = accumulator.EventAccumulator(str(folder / "fast"), size_guidance={"scalars": 0}).Reload()
    for name in theirs.Tags()["scalars"]:
        expected = [(each.step, each.value) for each in theirs.Scalars(name)]
        found = [(step, value) for tag, step, value in read_scalars(path) if tag == name]
        assert str(found) == str(expected)


def test_a_run_that_was_killed_while_it_wrote(folder: Path, tmp_path: Path) -> None:
    (path,) = (folder / "fast").glob("events.out.*")
    cut = tmp_path / path.name
    data = path.read_bytes()
    for left in (0, 5, 30, len(data) // 2, len(data) - 3):
        cut.write_bytes(data[:left])
        found = list(read_scalars(cut))
        assert found == list(read_scalars(path))[: len(found)] or any(value != value for *_, value in found)
    cut.write_bytes(b"\xff" * 200)
    assert list(read_scalars(cut)) == []
    (tmp_path / "metrics.csv").write_text("step,a,words\n0,1.5,none\n,2.5,\nnan,3,\n7,\n3,oops,x,y\n2,0.5\n")
    (run,) = read_runs([tmp_path])
    assert run.series == {"a": Series((0, 2), (1.5, 0.5))}


def test_a_page_is_complete_in_itself(folder: Path) -> None:
    assert report([str(folder), "--title=a < b"]) == 0
    text = (folder / "report.html").read_text()
    page = Page(text)
    assert page.open == []
    assert page.outside == []
    assert {"script", "link", "img", "iframe", "b"} & set(page.tags) == set()
    assert "url(" not in text
    assert "@import" not in text
    # Loss, two rates and the time of a step, shares (bars and a chart of each run), memory, devices, the rest.
    assert page.tags["svg"] == 1 + 3 + 3 + 1 + 1 + 1
    assert page.tags["h1"] == 1
    assert [heading in page.words for heading in ("Loss", "Throughput", "Where the time goes", "Memory")] == [True] * 4
    assert "a < b" in page.words
    assert "<b>lr</b>" in page.words
    assert "prefers-color-scheme: dark" in text
    assert page.tags["tr"] == 3
    for cell in ("fast", "slow", "95", "2000", "50.0%", "2.95 GiB"):
        assert cell in page.words.splitlines()
    assert "NaN" not in text
    assert not re.search(r'[dxy]="[^"]*nan', text)


def test_every_value_is_in_one_chart(folder: Path) -> None:
    (run,) = read_runs([folder / "slow"])
    sections = {section.title: section for section in sections_of([run])}
    titles = {name: [panel.title for panel in section.panels] for name, section in sections.items()}
    assert titles == {
        "Loss": ["train_loss"],
        "Throughput": ["breakdown/step_seconds", "throughput/mfu", "throughput/samples_per_sec"],
        "Where the time goes": ["in the mean", "slow"],
        "Memory": ["memory/peak_gib"],
        "Devices and hosts": ["monitor/utilization"],
        "Other values": ["<b>lr</b>"],
    }
    (devices,) = sections["Devices and hosts"].panels
    assert devices.key == (("monitor/rank0/utilization", 0), ("monitor/rank1/utilization", 1))
    assert not sections["Other values"].is_open


def test_charts() -> None:
    gap = line_chart("t", [Line("a", 0, [(0, 1.0), (1, 2.0), (2, math.nan), (3, 3.0), (4, 2.0)])])
    assert gap.count("M") == 2
    assert "a: 2 in the end" in gap
    assert "<circle" in line_chart("t", [Line("a", 0, [(7, 1.0)])])
    assert "<path" in line_chart("t", [Line("a", 9, [(7, math.inf)])])
    area = area_chart("t", [Line("a", 0, [(7, 0.25)]), Line("b", 1, [(7, 0.75)])])
    assert area.count("<path") == 2
    bars = share_bars("t", [("run", [Line("a", 0, [(0, 0.75)]), Line("b", 1, [(0, 0.25)])])])
    assert 'width="330.0"' in bars
    assert 'width="110.0"' in bars
    assert ">75%<" in bars
    empty = build_page([Run("r", {"x": Series((0,), (math.nan,))})], "t")
    assert Page(empty).tags["svg"] == 1


def test_scales() -> None:
    assert ticks(0, 1) == [0, 0.25, 0.5, 0.75, 1]
    assert ticks(-3, 17) == [0, 5, 10, 15]
    assert ticks(1990, 2000) == [1990, 1992.5, 1995, 1997.5, 2000]
    assert bounds([]) == (0, 1)
    assert bounds([3.0]) == (1.5, 4.5)
    assert bounds([0.0]) == (-1, 1)
    assert bounds([2.0, 3.0], from_zero=True) == (0, 3)
    points = [(float(step), 1000.0 if step == 777 else float(step % 7)) for step in range(5000)]
    few = thinned(points, 100)
    assert len(few) <= 100
    assert (777.0, 1000.0) in few
    assert few == sorted(few)
    assert [in_words(value) for value in (0.5, 12500, 2.5e6, 3e9, -4e12, math.inf)] == [
        "0.5",
        "12.5k",
        "2.5M",
        "3G",
        "-4T",
        "inf",
    ]


def test_bad_input(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"nowhere is no folder") as caught:
        report(["nowhere", "neither"])
    assert len(caught.value.violations) == 2
    with pytest.raises(ConfigurationError, match=r"there is no metrics.csv and no event file"):
        report([str(tmp_path)])
    with pytest.raises(ConfigurationError, match=r"there is no folder no/where"):
        report([str(tmp_path), "--out=no/where/page.html"])


@pytest.mark.slow
def test_the_page_of_a_fit_in_chromium(folder: Path, tmp_path: Path) -> None:
    """The browser draws it at two widths without overflow; where there is none, the page of a fit is parsed alone."""
    logger = CSVLogger(tmp_path, name="", version="fit")
    meters = [Throughput(every=1, peak=1e12), StepBreakdown(every=1)]
    trainer_for("auto", 1, callbacks=meters, logger=logger, log_every_n_steps=1).fit(ByteGPT(), loader(1, 4))
    path = tmp_path / "page.html"
    report([str(folder), str(tmp_path / "fit"), f"--out={path}"])
    assert {"throughput/mfu", "train_loss"} <= set(Page(path.read_text()).words.splitlines())
    if CHROMIUM is None:
        return
    # Scripts are the test's, behind the page: they tell how wide it is drawn.
    probe = tmp_path / "probe.html"
    found = "document.title=[...document.querySelectorAll('svg')].map(e=>e.getBoundingClientRect().width).join()"
    wide = "document.documentElement.scrollWidth<=innerWidth"
    probe.write_text(f"{path.read_text()}<script>{found}+';'+({wide})</script>")
    for width in (1400, 500):
        flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
        line = [CHROMIUM, *flags, f"--window-size={width},2000", "--dump-dom", probe.as_uri()]
        done = subprocess.run(line, capture_output=True, text=True, timeout=180, check=True)
        title = re.search(r"<title>([^<]*)</title>", done.stdout)
        assert title is not None
        widths, fits = title[1].split(";")
        assert fits == "true"
        shown = [float(each) for each in widths.split(",") if float(each)]
        assert len(shown) > 10
        assert max(shown) < width
        assert min(shown) > 200

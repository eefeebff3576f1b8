"""The figures of the documentation: as the script makes them, readable, and true of what the package does."""

from __future__ import annotations

import importlib
import itertools
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lightning_parallel.ranks.mesh import data_rank_of

DOCS = Path(__file__).parents[1] / "docs"
LEAST = 20
LEAST_CONTRAST = 4.5
"""Of small text and what lies behind it, as WCAG 2 asks for."""


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(DOCS)
        yield importlib.import_module("figures")


@pytest.fixture(scope="module")
def drawings(script: Any) -> dict[str, Any]:
    return {name: draw() for name, draw in script.FIGURES.items()}


def of(module: str) -> Any:
    """A module of `docs/drawing`; the fixture `script` makes it importable."""
    return importlib.import_module(f"drawing.{module}")


def test_committed_figures_are_those_of_the_script(script: Any, drawings: dict[str, Any]) -> None:
    """`python docs/figures.py` draws them anew."""
    assert len(drawings) >= LEAST
    assert {path.stem for path in script.FOLDER.glob("*.svg")} == set(drawings)
    old = [name for name, each in drawings.items() if (script.FOLDER / f"{name}.svg").read_text() != each.svg()]
    assert old == []


def test_figures_are_svg_with_a_title(drawings: dict[str, Any]) -> None:
    for name, drawing in drawings.items():
        root = ET.fromstring(drawing.svg())
        title = root.find("{http://www.w3.org/2000/svg}title")
        assert title is not None, name
        assert title.text, name


def test_curves_are_not_filled(drawings: dict[str, Any]) -> None:
    """A curve has the class of its color, which fills boxes; only a narrower selector takes that back."""
    svg = drawings["schedule_idle"].svg()
    assert 'class="curve ' in svg
    assert "path.curve { fill: none }" in svg


def test_texts_stay_on_the_canvas(drawings: dict[str, Any]) -> None:
    for name, drawing in drawings.items():
        width, height = drawing.size
        for label in drawing.labels:
            inside = label.left >= 0 and label.top >= 0 and label.right <= width and label.bottom <= height
            assert inside, (name, label.text)


def test_no_text_lies_on_another(drawings: dict[str, Any]) -> None:
    found = {
        (name, one.text, other.text)
        for name, drawing in drawings.items()
        for one, other in itertools.combinations(drawing.labels, 2)
        if one.overlaps(other)
    }
    assert found == set()


def test_texts_in_boxes_fit_into_them(drawings: dict[str, Any]) -> None:
    """A box that holds the middle of a text holds its ends, too."""
    for name, drawing in drawings.items():
        root = ET.fromstring(drawing.svg())
        boxes = [
            tuple(float(each.get(key, 0)) for key in ("x", "y", "width", "height"))
            for each in root.iter("{http://www.w3.org/2000/svg}rect")
            if each.get("class") != "paper"
        ]
        for label in drawing.labels:
            x, y = (label.left + label.right) / 2, (label.top + label.bottom) / 2
            for left, top, width, height in boxes:
                if left < x < left + width and top < y < top + height:
                    assert left <= label.left, (name, label.text)
                    assert label.right <= left + width, (name, label.text)


def test_colors_can_be_read_on_a_light_page_and_on_a_dark_one(script: Any) -> None:
    svg = of("svg")
    for ground in (0, 1):
        color = {name: pair[ground] for name, pair in svg.COLORS.items()}
        for fill in ("paper", *svg.FILLS):
            assert svg.contrast(color["ink"], color[fill]) >= LEAST_CONTRAST, (fill, ground)
        for fill in ("paper", "gray"):
            assert svg.contrast(color["muted"], color[fill]) >= LEAST_CONTRAST, (fill, ground)


def test_pages_show_every_figure(script: Any) -> None:
    """And each that a page shows is there, with words for those who do not see it."""
    shown = set()
    for page in DOCS.rglob("*.md"):
        for words, path in re.findall(r"!\[(.*?)\]\((\S+?\.svg)\)", page.read_text(), flags=re.DOTALL):
            assert (page.parent / path).is_file(), (page.name, path)
            assert len(words) > 20, (page.name, path)
            shown.add(Path(path).stem)
    assert set(script.FIGURES) - shown == set()


# What they state ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("schedule", "per_rank"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)])
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (4, 16)])
def test_idle_shares_are_those_of_theory(
    script: Any, schedule: str, per_rank: int, ranks: int, microbatches: int
) -> None:
    schedules = of("schedules")
    share = schedules.idle_share(schedules.timeline(schedule, ranks, microbatches), ranks)
    assert share == pytest.approx((ranks - 1) / (per_rank * microbatches + ranks - 1))


def test_idle_shares_are_those_of_the_benchmark(script: Any) -> None:
    """The column of what the order of each schedule implies, which another script has computed."""
    schedules = of("schedules")
    rows = of("plots").table_of("pipeline_bubble", "schedule")
    assert len(rows) == len(schedules.STAGES_PER_RANK)
    for row in rows:
        share = schedules.idle_share(schedules.timeline(row["schedule"].strip("`"), 2, 4), 2)
        assert f"{share:.3f}" == row["ideal"]


def test_activations_in_flight(script: Any) -> None:
    schedules = of("schedules")
    assert schedules.most_in_flight(schedules.timeline("1f1b", 4, 8), 4) == [4, 3, 2, 1]
    assert schedules.most_in_flight(schedules.timeline("gpipe", 4, 8), 4) == [8] * 4
    assert schedules.most_in_flight(schedules.timeline("1f1b", 4, 8, joins=True), 4) == [8] * 4


def test_no_computation_is_missing(script: Any) -> None:
    schedules = of("schedules")
    for name, stages in schedules.STAGES_PER_RANK.items():
        found = schedules.timeline(name, 4, 8)
        assert len(found) == 2 * 4 * stages * 8
        for rank in range(4):
            own = sorted((each.start, each.end) for each in found if each.rank == rank)
            assert all(one[1] <= other[0] for one, other in itertools.pairwise(own))


def test_places_in_the_mesh_are_those_of_the_package(script: Any) -> None:
    meshes = of("meshes")
    for name in meshes.PRESETS:
        degrees = meshes.degrees_of(name, 2, 4)
        if degrees is not None:
            innermost = meshes.innermost_of(name)
            for rank in range(8):
                at = meshes.coordinates(rank, degrees, innermost)
                data = at["replicate"] * degrees.shard + at["shard"]
                assert data == data_rank_of(rank, degrees, innermost=innermost), (name, rank)


def test_a_ring_all_reduce_ends_with_all_sums(script: Any) -> None:
    states = of("sums").ring_states(5)
    assert len(states) == 2 * 4 + 1
    assert all(chunk == frozenset(range(5)) for chunks in states[-1] for chunk in chunks)


def test_shares_of_all_ranks_are_the_whole(script: Any) -> None:
    placements = of("placements")
    whole = placements.all_bytes()
    held = placements.held_between_steps(4)
    assert sum(own.state for own in held["zero1_custom"]) == 2 * whole
    assert sum(own.parameters for own in held["zero2_custom, fsdp_custom"]) == whole
    assert sum(own.parameters for own in held["pp_custom"]) == whole
    assert whole / 4 < held["tp_custom"][0].parameters < whole / 3

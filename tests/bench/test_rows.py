"""Rows by their names, and the order in which cells take turns."""

from __future__ import annotations

import itertools

import pytest

from lightning_parallel.bench.cells import BASE, STRONG, WEAK, cells_of, runs_in_turn
from lightning_parallel.bench.rows import Row, names_of_lightning, row_violations, rows_in
from lightning_parallel.presets import PRESETS
from lightning_parallel.strategies.mesh import MeshStrategy


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("ddp_custom", ["ddp_custom"]),
        ("ddp_custom, loop,lightning:ddp", ["ddp_custom", "loop", "lightning:ddp"]),
        ("fsdp_custom:tensor=2,recompute=full,loop", ["fsdp_custom:tensor=2,recompute=full", "loop"]),
        ("hsdp_custom:layers=[a,b],loop", ["hsdp_custom:layers=[a,b]", "loop"]),
        ("fsdp_custom:precision_policy={param: bfloat16}", ["fsdp_custom:precision_policy={param: bfloat16}"]),
        ("all,loop", [*PRESETS, "loop"]),
    ],
)
def test_options_belong_to_the_name_before_them(text: str, names: list[str]) -> None:
    assert [row.name for row in rows_in(text)] == names
    assert row_violations(rows_in(text)) == []


def test_everything_that_is_wrong_with_names_is_said_at_once() -> None:
    rows = rows_in("fsdp_costum,fsdp_custom:color=red,lightning:ddq,ddp,loop,loop,lightning:ddp_spawn")
    found = row_violations(rows)
    words = [
        "did you mean fsdp_custom",
        "no option 'color'",
        "lightning:ddq is no",
        "give lightning:ddp",
        "loop twice",
        "ddp_spawn",
    ]
    assert len(found) == len(words)
    assert all(any(word in each for each in found) for word in words), found
    assert "possible: dp_custom" in row_violations([])[0]


def test_what_starts_ranks_by_itself_is_no_row() -> None:
    names = names_of_lightning()
    assert {"lightning:ddp", "lightning:fsdp", "lightning:ModelParallelStrategy"} <= set(names)
    assert not any("custom" in name or "spawn" in name for name in names)


def test_the_comparison_of_the_first_step_is_left_out_unless_it_is_asked_for() -> None:
    for name, options in (("fsdp_custom", "off"), ("fsdp_custom:tensor=1,check=first_step", "first_step")):
        strategy = Row(name).strategy()
        assert isinstance(strategy, MeshStrategy)
        assert strategy.first_step.check == options


def test_the_global_batch_grows_in_weak_scaling_only() -> None:
    cells = cells_of(["a", "b"], [4, 1, 2], "both")
    batches = {(cell.devices, cell.scaling): cell.batches for cell in cells}
    assert batches == {(1, BASE): 1, (2, WEAK): 2, (2, STRONG): 1, (4, WEAK): 4, (4, STRONG): 1}
    assert {cell.batches for cell in cells_of(["a"], [2, 4], "strong")} == {2}


def test_rows_take_turns() -> None:
    cells = cells_of(["a", "b", "c"], [1, 2], "weak")
    runs = runs_in_turn(cells, 3)
    assert len(set(runs)) == len(runs) == 18
    assert [run.repeat for run in runs] == [0] * 6 + [1] * 6 + [2] * 6
    rounds = ["".join(run.cell.row for run in part) for _, part in itertools.groupby(runs, lambda run: run.repeat)]
    assert rounds == ["abcabc", "bcabca", "cabcab"]

"""Every module under every name, against one process: losses, initial and final weights. The support matrix."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lightning_parallel
from lightning_parallel.presets import PRESETS
from tests.models.cases import CASES, REFUSED_CASES
from tests.names import num_ranks
from tests.parity import PARITY, TOLERANCE, Outcome, checked, largest, reference, train, worst
from tests.rank_pool import RankError, RankPool

MATRIX = Path(__file__).with_name("support_matrix.json")
CELLS: dict[tuple[str, str], str] = {
    (case, name): cell for case, row in json.loads(MATRIX.read_text())["cells"].items() for name, cell in row.items()
}
"""(module, name) -> "runs", or "refused: " and words of the reason."""
FAST = "byte_gpt"
"""The module that trains under every name in the fast tier, too."""
OPTIMIZERS = ("sgd", "adamw")


def run(ranks: Callable[[int], RankPool], case: str, optimizer: str, name: str) -> Outcome:
    plain = name.partition(":")[0]
    if plain == "dp_custom":
        return train(case, optimizer, name, 2)
    return ranks(num_ranks(plain)).run(train, case, optimizer, name, num_ranks(plain))[0]


RUNS = [
    pytest.param(case, name, marks=[pytest.mark.fast] if case == FAST else [])
    for (case, name), cell in CELLS.items()
    if cell == "runs"
]


@pytest.mark.parametrize(("case", "name"), RUNS)
def test_parity(ranks: Any, record_property: Any, case: str, name: str) -> None:
    # One of them with the comparison of the first step, which may find nothing.
    names = dict(zip(OPTIMIZERS, (checked(name), name), strict=True))
    differences = [
        worst(run(ranks, case, optimizer, names[optimizer]), reference(case, optimizer)) for optimizer in OPTIMIZERS
    ]
    record_property(PARITY, ((case, name), f"{largest(differences):.0e}"))
    assert largest(differences) <= TOLERANCE, dict(zip(OPTIMIZERS, differences, strict=True))


@pytest.mark.parametrize(("case", "name"), [(case, name) for case, name in CELLS if CELLS[case, name] != "runs"])
def test_refusal(ranks: Any, record_property: Any, case: str, name: str) -> None:
    reason = CELLS[case, name].removeprefix("refused: ")
    record_property(PARITY, ((case, name), "refused"))
    with pytest.raises((lightning_parallel.ConfigurationError, RankError)) as caught:
        run(ranks, case, "sgd", name)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("strategy", "size"),
    [
        ("fsdp_custom:reshard=2", 4),
        ("fsdp_custom:reshard=1", 2),
        ("fsdp_custom:replicate=2", 2),
        ("zero2_custom:replicate=2", 4),
        ("ddp_custom:static_graph=true", 2),
        ("ddp_custom:gradient_as_bucket_view=false,bucket_cap_mb=1", 2),
        ("fsdp_custom", 1),
        ("hsdp_custom", 1),
        ("hsdp_custom", 2),
        ("zero1_custom", 4),
        ("fsdp_custom", 4),
    ],
)
@pytest.mark.parametrize("case", ["byte_gpt", "bare_parameter"])
def test_parity_with_options(ranks: Any, case: str, strategy: str, size: int) -> None:
    outcome = ranks(size).run(train, case, "adamw", strategy, size)[0]
    assert worst(outcome, reference(case)) <= TOLERANCE


def test_the_matrix_lists_what_is_tested() -> None:
    """The docs are made from the committed table; the tests above run exactly what it says."""
    table = json.loads(MATRIX.read_text())
    assert table["names"] == list(PRESETS)
    arranged = ["flat", "hybrid", "list_of_lists", "repeated"]
    assert table["modules"] == [*CASES, *arranged, *REFUSED_CASES]
    assert all(list(row) == list(PRESETS) for row in table["cells"].values())
    assert all(cell == "runs" or cell.startswith("refused: ") for cell in CELLS.values())
    assert list(table["same_on_the_cpu"]) == ["dp_custom", "fsdp_offload_custom"]
    without_stack = ("conv_net", "lstm", "gan")
    cutting = ("cp_custom", "tp_custom", "fsdp_tp_custom", "pp_custom")
    refused = {(case, name) for case in without_stack for name in cutting}
    refused |= {(case, name) for case in REFUSED_CASES for name in PRESETS}
    assert {key for key, cell in CELLS.items() if cell != "runs"} == refused

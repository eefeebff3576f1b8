"""Modules with layers under products of degrees, against one process: losses, norms and weights. The second matrix."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.models.tables import TENSOR_MODULES
from tests.parity import Outcome, assert_same_training, checked, reference, train
from tests.rank_pool import RankError

TABLE = json.loads(Path(__file__).with_name("product_matrix.json").read_text())
CELLS: dict[tuple[str, str], str] = {
    (case, strategy): cell for case, row in TABLE["cells"].items() for strategy, cell in row.items()
}
"""(module, strategy) -> "runs", or "refused: " and words of the reason."""
LAYOUTS: dict[str, dict[str, int]] = TABLE["layouts"]
"""strategy -> the number of ranks, and how many of them read different samples."""
FAST = "byte_gpt"
"""The module that trains under every product in the fast tier, too: a version of torch can get one of them wrong."""
RUNS = [
    pytest.param(case, strategy, marks=[pytest.mark.fast] if case == FAST else [])
    for (case, strategy), cell in CELLS.items()
    if cell == "runs"
]


def run(ranks: Any, case: str, strategy: str) -> Outcome:
    layout = LAYOUTS[strategy]
    size, readers = layout["ranks"], layout["readers"]
    return ranks(size).run(train, case, "adamw", checked(strategy), size, readers, norms=True)[0]


@pytest.mark.parametrize(("case", "strategy"), RUNS)
def test_parity(ranks: Any, case: str, strategy: str) -> None:
    assert_same_training(run(ranks, case, strategy), reference(case, norms=True))


@pytest.mark.parametrize(("case", "strategy"), [key for key, cell in CELLS.items() if cell != "runs"])
def test_refusal(ranks: Any, case: str, strategy: str) -> None:
    with pytest.raises(RankError) as caught:
        run(ranks, case, strategy)
    assert "ConfigurationError" in str(caught.value)
    assert CELLS[case, strategy].removeprefix("refused: ") in str(caught.value)


def test_the_matrix_lists_what_is_tested() -> None:
    """Heads that two ranks of `tensor` share are too few for two of `context`."""
    assert TABLE["names"] == list(LAYOUTS)
    assert TABLE["modules"] == list(TABLE["cells"])
    assert set(TABLE["modules"]) <= set(TENSOR_MODULES)
    assert all(list(row) == TABLE["names"] for row in TABLE["cells"].values())
    assert all(cell == "runs" or cell.startswith("refused: ") for cell in CELLS.values())
    two_heads = ("byte_gpt", "hf_gpt2", "configure_model", "encoder_decoder", "varying_length")
    refused = {(case, "fsdp_custom:tensor=2,context=2") for case in two_heads}
    assert {key for key, cell in CELLS.items() if cell != "runs"} == refused

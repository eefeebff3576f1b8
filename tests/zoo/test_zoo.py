"""Public modules under the names, against one process. The table of the zoo; ``pytest -m zoo`` runs all of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parity import Outcome
from tests.zoo.cells import DEFECTS, NAMES, TOLERANCE, relative_difference, run_cell
from tests.zoo.packages import lacking, pinned
from tests.zoo.registry import ZOO

TABLE = json.loads(Path(__file__).with_name("zoo.json").read_text())
CELLS: dict[tuple[str, str], str] = {
    (module, name): cell for module, row in TABLE["cells"].items() for name, cell in row.items()
}
"""(module, name) -> "runs"; or "told", "refused", or a defect's word, and words of what is said."""
ALWAYS = ("qwen3_moe", "albert")
"""Modules that run in each whole test run; the others take their time."""
NAMED = {
    "t5": "model.decoder.block",
    "whisper": "model.model.decoder.layers",
    "clip": "model.vision_model.encoder.layers",
    "vit_mae": "model.decoder.decoder_layers",
    "torchvision_swin": "model.features.3",
    "timm_cait": "model.blocks_token_only",
    "flux": "model.single_transformer_blocks",
}
"""Modules with several stacks, and one that is cut alone where `layers` names it."""
RUNS = [
    pytest.param(module, name, marks=[] if module in ALWAYS else [pytest.mark.zoo], id=f"{module}-{name}")
    for module, name in CELLS
]


@pytest.mark.parametrize(("module", "name"), RUNS)
def test_cell(ranks: Any, module: str, name: str) -> None:
    """A defect of the table fails here too as soon as it is none: the table is to say so then."""
    if others := lacking(ZOO[module].packages):
        pytest.skip(f"the table of the zoo was made with {others}; pip install -e '.[zoo]'")
    expected, _, words = CELLS[module, name].partition(": ")
    found, said = run_cell(ranks, module, name)
    assert found == expected, said
    assert words in said


@pytest.mark.zoo
@pytest.mark.parametrize(("module", "layers"), NAMED.items())
def test_one_of_several_stacks_is_cut(ranks: Any, module: str, layers: str) -> None:
    if others := lacking(ZOO[module].packages):
        pytest.skip(f"the table of the zoo was made with {others}; pip install -e '.[zoo]'")
    found, said = run_cell(ranks, module, f"pp_custom:layers={layers}")
    assert found == "runs", said


def test_a_tensor_that_moves_a_little_less_is_seen() -> None:
    """By a tenth, in one that moves a hundredth of what another one does."""
    initial = {"large": torch.zeros(2), "small": torch.ones(2)}
    theirs = Outcome([1.0], [], initial, {"large": torch.full((2,), 0.1), "small": torch.full((2,), 1.001)})
    ours = Outcome([1.0], [], initial, {**theirs.final, "small": torch.full((2,), 1.0009)})
    assert relative_difference(theirs, theirs) == 0
    assert relative_difference(ours, theirs) > 10 * TOLERANCE


def test_the_table_lists_what_is_tested() -> None:
    assert TABLE["names"] == list(NAMES)
    assert TABLE["modules"] == list(TABLE["cells"]) == list(ZOO)
    assert len(ZOO) >= 40
    assert all(list(row) == list(NAMES) for row in TABLE["cells"].values())
    assert {cell.partition(": ")[0] for cell in CELLS.values()} <= {"runs", "told", "refused", *DEFECTS}
    assert set(ALWAYS) <= set(ZOO)


GATHERS = {("lightly_simclr", "pp_custom"), ("lightly_vicreg", "pp_custom")}
"""Steps that gather by torch's own functions from all ranks, of which those of a pipeline have the same samples: the
comparison of the first step ends these fits."""


def test_no_cell_is_a_defect() -> None:
    """No number is wrong without a word, no rank waits, and nothing ends in torch's words."""
    found = {key: cell for key, cell in CELLS.items() if cell.partition(": ")[0] in DEFECTS}
    assert found.keys() == GATHERS
    assert all(cell.startswith("differs: the first step under") for cell in found.values())


def test_every_package_is_pinned() -> None:
    assert {package for entry in ZOO.values() for package in entry.packages} == set(pinned())

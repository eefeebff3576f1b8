"""The average under a pipeline: each stage has that of its own parameters, wherever these go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.jobs.averages import assert_equal, fit_until, reference_of, train
from tests.models.pipelined import DeepTied, HeadFirst
from tests.parity import TOLERANCE, difference


@pytest.mark.parametrize(
    ("strategy", "make"),
    [
        ("pp_custom", DeepTied),
        ("pp_custom", HeadFirst),
        ("pp_custom:schedule=interleaved,virtual_stages=2", DeepTied),
    ],
)
def test_stages_hold_averages_of_their_own(ranks: Any, strategy: str, make: Any) -> None:
    """Of tied weights on several stages, and of those that the first step moves to another."""
    found = ranks(2).run(train, strategy, 2, make, 2)[0]
    reference = reference_of(make, 2)
    assert_equal(found, reference)
    assert found["after"] == pytest.approx(reference["val"][-1], abs=TOLERANCE)
    assert difference(found["weights after"], found["weights"]) == 0


@pytest.mark.parametrize("sanity", [-1, 0])
def test_an_average_follows_parameters_that_change_stages(ranks: Any, tmp_path: Path, sanity: int) -> None:
    """The sanity check, or the first step, sees the average of the checkpoint, and that they are used elsewhere."""
    path = str(tmp_path / "saved.ckpt")
    whole = fit_until("auto", 1, path, False, HeadFirst)
    found = ranks(2).run(fit_until, "pp_custom", 2, path, True, HeadFirst, sanity)[0]
    assert difference(found["average"], whole["average"]) <= TOLERANCE
    assert difference(found["weights"], whole["weights"]) <= TOLERANCE
    assert found["val"] == pytest.approx(whole["val"] if sanity else whole["val"][1:], abs=TOLERANCE)

"""Two ways at once of cutting the layers, on four ranks: one process's numbers."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parity import TOLERANCE, is_moving, worst
from tests.test_context import train


@pytest.mark.parametrize(
    "strategy",
    ["fsdp_custom:tensor=2,pipeline=2", "fsdp_custom:context=2,pipeline=2", "fsdp_custom:tensor=2,context=2"],
)
@pytest.mark.parametrize("case", ["llama", "bert", "hf_gpt2"])
def test_products_of_what_cuts_layers(ranks: Any, case: str, strategy: str) -> None:
    if case == "hf_gpt2" and "tensor=2,context=2" in strategy:
        pytest.skip("it has two heads, one on each rank, and context parallel would share that")
    expected = train(case, "auto", 1, 1)
    assert is_moving(expected)
    assert worst(ranks(4).run(train, case, strategy, 4, 1)[0], expected) < TOLERANCE

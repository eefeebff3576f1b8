"""Linear maps in float8, and which cannot be."""

from __future__ import annotations

import pytest
from torch import nn

from lightning_parallel import ConfigurationError, build_strategy
from lightning_parallel.techniques.float8 import unfitting_violations
from tests.data import loader
from tests.models.cases import CASES
from tests.parity import make_trainer


def test_float8_needs_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"lightning_parallel\[float8\]"):
        make_trainer(build_strategy("fsdp_custom:float8=rowwise:emulate"), 2)


def test_float8_needs_maps_that_fit() -> None:
    assert unfitting_violations([nn.Linear(8, 24), nn.Linear(16, 32)], "tensorwise") == []
    assert "multiples of 16 (8 x 24)" in unfitting_violations([nn.Linear(8, 24)], "tensorwise")[0]
    with pytest.raises(ConfigurationError, match="0 linear maps"):  # Hugging Face's GPT-2 has Conv1D
        make_trainer(build_strategy("ddp_custom:float8=tensorwise:emulate"), 2).fit(CASES["hf_gpt2"](), loader(1, 1))

"""Sketches of outputs tell where two runs begin to differ, and nothing that is not so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_parallel.module.differences import Tolerance
from lightning_parallel.module.output_sketches import OutputSketches, first_difference
from lightning_parallel.module.placeholders import placeholder_like

FP32 = Tolerance(torch.finfo(torch.float32).eps)
SIZE = 48


class Scaled(nn.Linear):
    factor = 1.0

    def forward(self, values: Tensor) -> Tensor:
        return super().forward(values) * self.factor


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Scaled(SIZE, SIZE), nn.Sequential(nn.LayerNorm(SIZE), Scaled(SIZE, SIZE)), Scaled(SIZE, 3))


def sketched(module: nn.Module, *batches: Tensor, leaves_out: tuple[str, ...] = ()) -> OutputSketches:
    sketches = OutputSketches(module, leaves_out)
    with sketches.taken():
        for batch in batches:
            module(batch)
    assert not any(child._forward_hooks for child in module.modules())
    return sketches


def verdicts(ours: nn.Module, *batches: Tensor, whole: Tensor, **kwargs: Any) -> dict[str, float | None]:
    return sketched(ours, *batches, **kwargs).verdicts(sketched(layers(), whole, **kwargs), FP32)


def changed(path: str) -> nn.Module:
    module = layers()
    child: Any = module.get_submodule(path)
    child.factor = 1.01
    return module


@pytest.fixture
def batch() -> Tensor:
    return torch.randn(8, 5, SIZE, generator=torch.Generator().manual_seed(1))


def test_equal_runs(batch: Tensor) -> None:
    found = verdicts(layers(), batch + 1e-8, whole=batch)
    assert found == dict.fromkeys(["0", "1.0", "1.1", "1", "2"], 0.0)
    assert first_difference([found]) == ""


@pytest.mark.parametrize(("path", "before"), [("0", ""), ("1.1", "1.0"), ("2", "1")])
def test_the_first_that_differs(batch: Tensor, path: str, before: str) -> None:
    words = first_difference([verdicts(changed(path), batch, whole=batch)])
    assert words.startswith(f"the output of {path!r} is the first to differ, by about 1.0e-02 of its norm")
    assert words.endswith(f", after that of {before!r}, which is equal") or not before


def test_what_is_left_out_is_not_named(batch: Tensor) -> None:
    found = verdicts(changed("1.1"), batch, whole=batch, leaves_out=("1",))
    assert list(found) == ["0", "1", "2"]
    assert "the output of '1' is the first to differ" in first_difference([found])


def test_microbatches_in_any_order(batch: Tensor) -> None:
    parts = batch.split(2)
    assert not any(verdicts(layers(), *reversed(parts), whole=batch).values())
    assert "'1.1'" in first_difference([verdicts(changed("1.1"), *parts, whole=batch)])


def test_another_kind_of_output_is_not_compared(batch: Tensor) -> None:
    unknown = dict.fromkeys(["0", "1.0", "1.1", "1", "2"])
    assert verdicts(layers(), batch[:, :2], whole=batch) == unknown  # a part of each sequence
    assert verdicts(layers(), batch[:4], whole=batch) == unknown
    assert verdicts(layers(), batch, batch, whole=batch) == unknown
    assert verdicts(layers(), placeholder_like(batch), whole=batch) == unknown
    assert first_difference([unknown]) == ""


def test_ranks_that_know_parts() -> None:
    first = {"a": 0.0, "b": None, "c": None, "d": 0.5}
    second = {"a": None, "b": None, "c": 0.0, "d": None}
    assert first_difference([first, second]) == (
        "the output of 'd' is the first to differ, by about 5.0e-01 of its norm, after that of 'c', which is equal"
    )
    second["b"] = 0.25
    assert "the output of 'b'" in first_difference([first, second])
    third: dict[str, float | None] = {"a": 0.0, "b": None, "c": None, "d": float("inf")}
    assert first_difference([third]).endswith("; 2 modules between these were not compared")
    assert first_difference([dict.fromkeys("abcd", 0.0)]) == ""

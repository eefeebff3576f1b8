"""Arithmetic of stages and microbatches."""

from __future__ import annotations

import pytest
import torch

from lightning_parallel import ConfigurationError
from lightning_parallel.techniques.pipeline.microbatches import (
    batch_size_of,
    cut_batch,
    has_uneven_entries,
    merge_outputs,
)
from lightning_parallel.techniques.pipeline.schedules import PipelinePolicy
from lightning_parallel.techniques.pipeline.stage_plan import StepCosts, balanced


def test_balance() -> None:
    assert balanced(StepCosts((10,) * 8, 0, 0), 2) == (4, 4)
    assert balanced(StepCosts((10,) * 8, 40, 0), 2) == (2, 6)
    assert balanced(StepCosts((10,) * 6, 10, 30), 3) == (2, 3, 1)
    assert balanced(StepCosts((10, 10), 900, 0), 2) == (1, 1)


@pytest.mark.parametrize(("size", "expected"), [(8, 4), (12, 4), (6, 3), (2, 2)], ids=lambda value: str(value))
def test_number_of_microbatches(size: int, expected: int) -> None:
    policy = PipelinePolicy()
    assert policy.training_microbatches(size, 2) == expected
    assert [policy.any_microbatches(n, 2) for n in (1, 5, 7, 9)] == [1, 1, 1, 3]


def test_batches_are_cut_and_outputs_joined() -> None:
    batch = {"x": torch.arange(8).view(4, 2), "names": list("abcd"), "pair": (torch.arange(4), 7), "w": torch.ones(3)}
    first, second = cut_batch(batch, batch_size_of(batch), 2)
    assert first["names"] == ["a", "b"]
    assert second["x"].tolist() == [[4, 5], [6, 7]]
    assert second["pair"][0].tolist() == [2, 3]
    assert second["pair"][1] == 7
    assert second["w"] is batch["w"]
    rows = [torch.full((2, 1), float(i)) for i in (1, 2)]
    parts = [{"rows": row, "mean": row.mean(), "ids": [int(row[0])] * 2, "n": 3} for row in rows]
    merged = merge_outputs(parts, 2)
    assert merged["rows"].flatten().tolist() == [1, 1, 2, 2]
    assert (float(merged["mean"]), merged["ids"], merged["n"]) == (1.5, [1, 1, 2, 2], 3)
    with pytest.raises(ConfigurationError, match="differs from microbatch to microbatch"):
        merge_outputs([{"table": torch.ones(3, 3)}, {"table": torch.zeros(3, 3)}], 2)
    with pytest.raises(ConfigurationError, match="no tensor"):
        batch_size_of({"names": ["a"]})


def test_entries_that_count_differ_from_microbatch_to_microbatch() -> None:
    tokens = torch.arange(24).view(4, 6) + 2
    labels = tokens.clone()
    assert not has_uneven_entries((tokens, labels, torch.rand(4, 6)), 4, 2)
    labels[0, 1:3] = labels[2, 1:3] = -100
    assert not has_uneven_entries({"labels": labels}, 4, 2)
    labels[3, 0] = labels[1, 5] = -100
    assert has_uneven_entries({"labels": labels}, 4, 2)  # as many, but not in the same places
    mask = torch.ones(4, 6, dtype=torch.long)
    assert not has_uneven_entries([mask, tokens], 4, 4)
    mask[3, 4:] = 0
    assert has_uneven_entries([mask, tokens], 4, 4)
    assert has_uneven_entries(mask.bool(), 4, 4)
    assert not has_uneven_entries((tokens, "text", 3, mask[0]), 4, 2)  # what is not cut is in all of them

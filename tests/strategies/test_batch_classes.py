"""Batches of a class of their own: a dataclass that looks at each value it is given, as those of anomalib do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tests.data import GLOBAL_BATCH, data_of
from tests.jobs.losses import lines
from tests.models.cases import ByteGPT
from tests.models.faults import SumOfSamples
from tests.names import num_ranks, num_readers
from tests.parity import TOLERANCE, Outcome, checked, is_moving, once, train_module, worst

STEPS = 3


@dataclass
class TokenBatch:
    """Rows of tokens, and where they come from."""

    tokens: Tensor
    source: str = "memory"

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "tokens" and not isinstance(value, Tensor):
            raise TypeError(f"{name} takes a tensor, not {type(value).__name__}")
        super().__setattr__(name, value)


class TakesTokenBatches(ByteGPT):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert type(batch) is TokenBatch
        return super().training_step([batch.tokens], batch_idx)


class SumsTokenBatches(SumOfSamples):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step([batch.tokens], batch_idx)


def trained(make: Any, name: str, size: int) -> tuple[Outcome, list[str]]:
    """What came of it, and what was said of the loss."""
    readers = num_readers(name, size) if name != "auto" else 1
    data = DataLoader(
        data_of("byte_gpt", STEPS * GLOBAL_BATCH, GLOBAL_BATCH),
        batch_size=GLOBAL_BATCH // readers,
        collate_fn=lambda rows: TokenBatch(torch.stack([row for (row,) in rows])),
    )
    with lines() as found:
        outcome = train_module(make, data, name if name == "auto" else checked(name), size)
    return outcome, found


@pytest.mark.parametrize("name", ["ddp_custom", "zero1_custom", "fsdp_custom", "tp_custom", "cp_custom", "pp_custom"])
def test_as_one_process(ranks: Any, name: str) -> None:
    expected, _ = once(trained, TakesTokenBatches, "auto", 1)
    assert is_moving(expected)
    found, told = ranks(num_ranks(name)).run(trained, TakesTokenBatches, name, num_ranks(name))[0]
    assert worst(found, expected) <= TOLERANCE
    assert told == []


def test_their_samples_are_looked_at(ranks: Any) -> None:
    _, told = ranks(2).run(trained, SumsTokenBatches, "ddp_custom", 2)[0]
    assert len(told) == 1
    assert told[0].startswith("the loss is a sum over samples")

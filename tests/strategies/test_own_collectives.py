"""Collectives of a step over all ranks: sums count twice what ranks share, and the first step says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.jobs.first_steps import ends_before_an_update, fit
from tests.models.cases import ByteGPT


class Summing(ByteGPT):
    """The number of tokens of all ranks, as a codebook counts its entries."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        count = torch.tensor(float(batch[0].numel()))
        dist.all_reduce(count)
        self.log("count", count / self.ranks_of(count))
        return super().training_step(batch, batch_idx)

    def ranks_of(self, count: Tensor) -> int:
        """The number by which the sum is divided."""
        return 1


class Averaging(Summing):
    """The mean over ranks, which is right whoever shares samples."""

    def ranks_of(self, count: Tensor) -> int:
        return dist.get_world_size()


@pytest.mark.parametrize("strategy", ["tp_custom", "cp_custom"])
def test_a_sum_over_ranks_that_share_samples_ends_the_fit(ranks: Any, strategy: str) -> None:
    words = ranks(2).run(ends_before_an_update, Summing, strategy)[0]
    assert "'count' is logged as " in words


@pytest.mark.parametrize(
    ("make", "strategy", "size", "readers"),
    [
        (Averaging, "tp_custom", 2, 1),
        (Averaging, "cp_custom", 2, 1),
        (Averaging, "fsdp_custom:tensor=2", 4, 2),
        (Summing, "fsdp_custom", 2, 2),
        (Averaging, "ddp_custom", 2, 2),
    ],
)
def test_what_is_right_goes_on(ranks: Any, make: Any, strategy: str, size: int, readers: int) -> None:
    _, lines = ranks(size).run(fit, make, "byte_gpt", strategy, size, readers)[0]
    assert lines[0].startswith("first step equals one process")

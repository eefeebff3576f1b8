"""The batch size that fits on all stages of a pipeline, which the first step may cut otherwise."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from torch import Tensor, nn

from tests.jobs.sized import LIMIT, Eventful, RunsOut, Sized, assert_same_run, train
from tests.rank_pool import RankError


class SizedHeadFirst(Sized):
    """Registered in another order than it is called, so that its first step cuts it otherwise."""

    def __init__(self, batch_size: int = 2) -> None:
        super().__init__(batch_size)
        gpt = self.model
        self.model = nn.Module()  # type: ignore[assignment]
        self.model.norm, self.model.head, self.model.blocks = gpt.norm, gpt.head, gpt.blocks
        self.model.tokens = gpt.tokens

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.model.tokens(tokens)
        for block in self.model.blocks:
            hidden = block(hidden)
        return self.model.head(self.model.norm(hidden))  # type: ignore[no-any-return]


class SizedTwice(Sized):
    """Calls its layers twice, which the first step shows."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) + super().forward(tokens)


@pytest.mark.parametrize(
    ("kind", "find", "size"),
    [
        (SizedHeadFirst, {"start": 3, "memory_limit": 50_000}, 12),
        (SizedTwice, {"start": 3}, 10),
        (Eventful, {"start": 8, "memory_limit": 35_000}, 32),
    ],
)
def test_pipelines(ranks: Any, kind: Any, find: dict[str, Any], size: int) -> None:
    """Batches are cut into as many microbatches whatever their size; whole ones may have any."""
    found = ranks(2).run(train, "pp_custom", 2, kind, find)
    assert {each["size"] for each in found} == {size}, found[0]["peaks"]
    assert max(found[0]["peaks"].values()) <= find.get("memory_limit", LIMIT) * 0.9
    fresh = ranks(2).run(train, "pp_custom", 2, functools.partial(kind, found[0]["size"]), None)
    for ours, theirs in zip(found, fresh, strict=True):
        assert_same_run(ours, theirs)


def test_a_stage_that_runs_out_of_memory_says_so(ranks: Any) -> None:
    """Others wait for it within the step."""
    with pytest.raises(RankError) as error:
        ranks(2).run(train, "pp_custom", 2, RunsOut, {"memory_limit": 10**9})
    assert "ran out of memory on a rank of a pipeline" in str(error.value)

"""Ranks that change their parts of the same tensors differently end the fit: the parts hide it otherwise."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import LearningRateFinder
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks
from torch.utils.data import DataLoader

from lightning_parallel import RanksDifferError, build_strategy, full_state_dict
from lightning_parallel.callbacks import BatchSizeFinder
from lightning_parallel.strategies import equal_changes
from tests.data import batches, data_of
from tests.models.decided import (
    OWN,
    WRITING,
    ClipsByAll,
    Decides,
    FollowsLoss,
    ForItself,
    OfAllRanks,
    Scales,
    SkipsUpdates,
)
from tests.names import num_readers
from tests.parity import TOLERANCE, difference, make_trainer, once

OTHERS = "ranks change their parts differently; rank 0 says how"


def fitted(make: Any, strategy: str, num_ranks: int, readers: int, num_steps: int = 6) -> tuple[str, Any]:
    """Some steps: the error of this rank, and the weights that come of them."""
    L.seed_everything(3, verbose=False)
    trainer = make_trainer("auto" if strategy == "auto" else build_strategy(strategy), num_ranks)
    try:
        trainer.fit(make(), batches("byte_gpt", readers, num_steps))
    except RanksDifferError as error:
        return str(error), None
    return "", full_state_dict(trainer)


def errors(outcomes: Any) -> list[str]:
    return [error for error, _ in outcomes]


@pytest.mark.parametrize("name", ["fsdp_custom", "zero2_custom"])
@pytest.mark.parametrize("make", WRITING)
def test_numbers_of_own_samples(ranks: Any, make: type[nn.Module], name: str) -> None:
    first, other = errors(ranks(2).run(fitted, make, name, 2, 2))
    assert "ranks have changed their parts of the same tensors differently" in first
    assert "decided.py:" in first
    assert "self.all_gather(loss).mean()" in first
    assert other == OTHERS


@pytest.mark.parametrize("make", OWN)
def test_numbers_of_one_rank(ranks: Any, make: type[nn.Module]) -> None:
    first, other = errors(ranks(2).run(fitted, make, "fsdp_custom", 2, 2))
    assert "ranks have changed their parts of the same tensors differently" in first
    assert other == OTHERS


@pytest.mark.parametrize("name", ["fsdp_custom", "tp_custom"])
def test_what_a_rank_has_for_itself(ranks: Any, name: str) -> None:
    assert errors(ranks(2).run(fitted, ForItself, name, 2, num_readers(name, 2))) == ["", ""]


@pytest.mark.parametrize(
    ("name", "size", "readers"),
    [("hsdp_custom", 4, 4), ("fsdp_custom:pipeline=2,shard=2", 4, 2), ("fsdp_custom:context=2", 4, 2)],
    ids=str,
)
def test_under_products(ranks: Any, name: str, size: int, readers: int) -> None:
    first, *others = errors(ranks(size).run(fitted, Scales, name, size, readers))
    assert "mul_() at decided.py:" in first
    assert set(others) == {OTHERS}


@pytest.mark.parametrize("name", ["fsdp_custom", "zero1_custom", "ddp_custom"])
def test_a_learning_rate_that_follows_each_rank_s_loss(ranks: Any, name: str) -> None:
    first, _ = errors(ranks(2).run(fitted, FollowsLoss, name, 2, 2))
    assert "the learning rate of group 0 of optimizer 0 (AdamW) was used on rank 0 1 time, with 0.0036" in first


def test_an_update_that_one_rank_leaves_out(ranks: Any) -> None:
    """Between two looks, and found by the one at the end."""
    first, _ = errors(ranks(2).run(fitted, SkipsUpdates, "fsdp_custom", 2, 2))
    assert "since step 3: the learning rate of group 0" in first
    assert "on rank 0 3 times, with 0.01 on average, and on rank 1 2 times" in first


NAMES = [
    ("fsdp_custom", 2, 2),
    ("zero1_custom", 2, 2),
    ("tp_custom", 2, 1),
    ("cp_custom", 2, 1),
    ("pp_custom", 2, 1),
    ("fsdp_custom:pipeline=2,shard=2", 4, 2),
    ("fsdp_tp_custom", 4, 2),
]


@pytest.mark.parametrize(("name", "size", "readers"), NAMES, ids=str)
def test_numbers_of_all_ranks(ranks: Any, name: str, size: int, readers: int) -> None:
    """A mean of losses of equally many samples is that of one process."""
    _, expected = once(fitted, OfAllRanks, "auto", 1, 1)
    error, weights = ranks(size).run(fitted, OfAllRanks, name, size, readers)[0]
    assert error == ""
    assert difference(weights, expected) < TOLERANCE


@pytest.mark.parametrize("name", ["fsdp_custom", "zero2_custom"])
def test_clipped_to_a_norm_of_all_ranks(ranks: Any, name: str) -> None:
    _, expected = once(fitted, ClipsByAll, "auto", 1, 1)
    error, weights = ranks(2).run(fitted, ClipsByAll, name, 2, 2)[0]
    assert error == ""
    assert difference(weights, expected) < TOLERANCE


@pytest.mark.parametrize("make", [Decides, *WRITING, FollowsLoss])
@pytest.mark.parametrize("name", ["tp_custom", "cp_custom"])
def test_ranks_that_share_samples_decide_alike(ranks: Any, make: type[nn.Module], name: str) -> None:
    _, expected = once(fitted, make, "auto", 1, 1)
    error, weights = ranks(2).run(fitted, make, name, 2, 1)[0]
    assert error == ""
    assert difference(weights, expected) < TOLERANCE


def test_nobody_looks_who_is_told_not_to(ranks: Any) -> None:
    assert errors(ranks(2).run(fitted, Scales, "fsdp_custom:check=off", 2, 2)) == ["", ""]


def done(of_ranks: list[dict[str, tuple[int, float, float]]], readers: list[int], stages: list[int]) -> str:
    """The first thing that ranks have done differently, "" if there is none."""
    known = [{what: equal_changes._Done(*each) for what, each in own.items()} for own in of_ranks]
    found = equal_changes._first_difference(list(zip(stages, known, strict=True)), readers)
    return "" if found is None else found[0]


RATE = "the learning rate of group 0"


def test_what_is_taken_for_rounding() -> None:
    parts = [{"mul_()": (3, 1.0, 1.0)}, {"mul_()": (3, 1.001, 1.001)}]
    assert done(parts, [0, 1], [0, 0]) == "mul_()"
    assert done(parts, [0, 0], [0, 0]) == ""  # copies of the same samples
    assert done([{"mul_()": (1, math.nan, math.nan)}] * 2, [0, 1], [0, 0]) == ""
    assert done([{"mul_()": (1, math.inf, math.inf)}] * 2, [0, 1], [0, 0]) == ""
    assert done([{"mul_()": (1, math.nan, math.nan)}, {"mul_()": (1, 1.0, 1.0)}], [0, 1], [0, 0]) == "mul_()"


def test_what_stages_have_in_common() -> None:
    own = [{"mul_()": (3, 1.0, 1.0), RATE: (2, 0.2, 0.2)}, {"fill_()": (1, 5.0, 5.0), RATE: (8, 0.8, 0.8)}]
    assert done(own, [0, 0], [0, 1]) == ""
    assert done(own, [0, 0], [0, 0]) == "mul_()"
    own[1][RATE] = (8, 1.6, 1.6)
    assert done(own, [0, 0], [0, 1]) == RATE


class Searched(Decides):
    """What finders of batch sizes and learning rates set is there."""

    batch_size, lr = 2, 1e-2

    def train_dataloader(self) -> Any:
        return DataLoader(data_of("byte_gpt", 64, 8), batch_size=self.batch_size)


def hooks_left(make_finder: Any) -> int:
    """The number of hooks on all updates that a fit leaves behind which begins with a search."""
    before = len(_global_optimizer_post_hooks)
    trainer = make_trainer(build_strategy("fsdp_custom"), 2, callbacks=[make_finder()], max_steps=2)
    trainer.fit(Searched())
    assert trainer.global_step == 2
    return len(_global_optimizer_post_hooks) - before


def batch_size_finder() -> Any:
    return BatchSizeFinder(maximum=4, steps=2)


def learning_rate_finder() -> Any:
    return LearningRateFinder(num_training_steps=4, early_stop_threshold=None)


@pytest.mark.parametrize("make_finder", [batch_size_finder, learning_rate_finder])
def test_a_search_before_training(ranks: Any, make_finder: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert ranks(2).run(hooks_left, make_finder) == [0, 0]

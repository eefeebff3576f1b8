"""Collectives over all ranks: sums count twice what ranks share, and the first step or a line says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parallel import _torch, build_strategy
from tests.data import batches
from tests.jobs.first_steps import ends_before_an_update, fit, said
from tests.models.cases import ByteGPT
from tests.parity import make_trainer


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


class Counting(ByteGPT):
    """Counts samples and adds up losses in validation, and has hooks ask all ranks for them in several ways.

    Args:
        how: The name of one of its methods.
    """

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.found, self.count = how, list[float](), torch.zeros(2)

    def on_validation_epoch_start(self) -> None:
        self.count = torch.zeros(2)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.count += torch.tensor([len(batch[0]), float(self.loss(batch[0])) * len(batch[0])])

    def on_validation_epoch_end(self) -> None:
        if dist.is_initialized():
            getattr(self, self.how)()
        self.found += self.count.tolist()

    def added(self) -> None:
        dist.all_reduce(self.count)

    def added_for_readers(self) -> None:
        dist.all_reduce(self.count, group=self.trainer.strategy.data_group)  # type: ignore[attr-defined]

    def largest(self) -> None:
        dist.all_reduce(self.count, op=dist.ReduceOp.MAX)

    def of_all_objects(self) -> None:
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, self.count.tolist())
        self.count = torch.tensor(found).sum(0)

    def in_own_group(self) -> None:
        dist.all_reduce(self.count, group=dist.new_group())


def counted(how: str, strategy: str, size: int, readers: int) -> tuple[list[float], list[str]]:
    """What validations of two epochs find, and what is said of collectives."""
    data = batches("byte_gpt", readers)
    trainer = make_trainer(build_strategy(strategy) if size > 1 else "auto", size, max_epochs=2)
    torch.manual_seed(3)
    with said("torch.distributed.") as lines:
        trainer.fit(module := Counting(how), data, data)
    return module.found, lines


@pytest.mark.parametrize(
    ("how", "strategy", "size", "readers", "times"),
    [
        ("added", "tp_custom", 2, 1, 2),
        ("added", "pp_custom", 2, 1, 2),
        ("added", "cp_custom", 2, 1, 2),
        ("added", "fsdp_custom:tensor=2", 4, 2, 2),
        ("added", "fsdp_custom", 2, 2, 1),
        ("of_all_objects", "tp_custom", 2, 1, 2),
        ("in_own_group", "pp_custom", 2, 1, 2),
        ("added_for_readers", "tp_custom", 2, 1, 1),
        ("added_for_readers", "fsdp_custom:tensor=2", 4, 2, 1),
        ("largest", "tp_custom", 2, 1, 1),
    ],
)
def test_a_line_says_where_a_hook_counts_samples_repeatedly(
    ranks: Any, how: str, strategy: str, size: int, readers: int, times: int
) -> None:
    expected, _ = counted(how, "auto", 1, 1)
    outcomes = ranks(size).run(counted, how, strategy, size, readers)
    for found, _ in outcomes:
        assert found == pytest.approx([times * each for each in expected], rel=1e-5)
    lines = outcomes[0][1]
    told = f"asks all {size} ranks, of which {times} at a time read the same samples"
    assert len(lines) == (times > 1)
    assert all(told in line and "test_own_collectives.py:" in line for line in lines)


def names_noted() -> tuple[list[Any], list[Any]]:
    """What an outer and an inner context note of a sum."""
    outer, inner = list[Any](), list[Any]()
    with (
        _torch.groups.collectives_checked(lambda name, group, op: outer.append((name, op == dist.ReduceOp.SUM))),
        _torch.groups.collectives_checked(lambda name, group, op: inner.append((name, op == dist.ReduceOp.SUM))),
    ):
        dist.all_reduce(torch.ones(1))
    return outer, inner


def test_contexts_around_others_find_the_collective(ranks: Any) -> None:
    assert ranks(2).run(names_noted)[0] == ([("all_reduce", True)], [("all_reduce", True)])

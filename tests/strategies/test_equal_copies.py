"""Ranks that part while a fit goes on are told from ranks that hold what they must, without being asked to look."""

from __future__ import annotations

from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch.distributed.tensor import DTensor

from lightning_parallel import RanksDifferError, build_strategy
from lightning_parallel.strategies import equal_copies
from tests.data import batches
from tests.models.cases import ByteGPT
from tests.models.pipelined import DeepTied
from tests.names import num_readers
from tests.parity import make_trainer

SPOILED = "model.norm.weight"
"""Whole on each rank of tensor parallel, too."""


class Spoils(Callback):
    """The last rank changes its copy of a parameter by itself.

    Args:
        after: The number of steps behind which it does.
        by: What it adds to the first element.
        name: The parameter.
    """

    def __init__(self, after: int, by: float = 0.1, name: str = SPOILED) -> None:
        self.after, self.by, self.name = after, by, name

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *args: Any) -> None:
        if trainer.global_step == self.after and trainer.global_rank == trainer.world_size - 1:
            parameter = module.get_parameter(self.name).detach()
            (parameter.to_local() if isinstance(parameter, DTensor) else parameter).view(-1)[:1].add_(self.by)


class DrawsNoise(Callback):
    """Noise on gradients behind their reduction, of a generator that each rank has begun differently."""

    def on_before_optimizer_step(self, trainer: L.Trainer, module: Any, *args: Any) -> None:
        generator = torch.Generator().manual_seed(trainer.global_rank)
        for parameter in module.parameters():
            parameter.grad.add_(1e-3 * torch.randn(parameter.shape, generator=generator))


def fitted(callback: Any, strategy: str, num_ranks: int, make: Any = ByteGPT, num_steps: int = 6) -> str:
    """Some steps, and the error of this rank."""
    L.seed_everything(3, verbose=False)
    trainer = make_trainer(build_strategy(strategy), num_ranks, callbacks=[callback])
    readers = num_readers(strategy.partition(":")[0], num_ranks)
    try:
        trainer.fit(make("adamw"), batches("byte_gpt", readers, num_steps))
    except RanksDifferError as error:
        return str(error)
    assert trainer.global_step == num_steps
    return ""


@pytest.mark.parametrize("name", ["ddp_custom", "zero1_custom", "tp_custom"])
def test_a_rank_that_parts_ends_the_fit(ranks: Any, name: str) -> None:
    first, other = ranks(2).run(fitted, Spoils(3), name, 2)
    assert f"after step 3, {SPOILED} differs between rank 0 and rank 1" in first
    assert "they were equal after step 2" in first
    assert other == "ranks hold different values; rank 0 says which"


def test_copies_of_a_shard(ranks: Any) -> None:
    first, *_ = ranks(4).run(fitted, Spoils(2), "hsdp_custom", 4)
    assert f"after step 2, {SPOILED} differs between rank 1 and rank 3" in first


class SpoilsAnotherShard(Spoils):
    """Beside a difference by rounding in the last rank's shard, one in that of the rank before."""

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *args: Any) -> None:
        super().on_train_batch_end(trainer, module, *args)
        if trainer.global_step == self.after and trainer.global_rank == trainer.world_size - 2:
            module.get_parameter(self.name).detach().to_local().view(-1)[:1].add_(0.1)


def test_rounding_in_one_shard_hides_nothing_in_another(ranks: Any) -> None:
    first, *_ = ranks(4).run(fitted, SpoilsAnotherShard(2, by=1e-6), "hsdp_custom", 4)
    assert f"after step 2, {SPOILED} differs between rank 0 and rank 2" in first


def test_a_tied_weight_of_two_stages(ranks: Any) -> None:
    first, _ = ranks(2).run(fitted, Spoils(2, name="model.tokens.weight"), "pp_custom", 2, make=DeepTied)
    assert "after step 2, model.tokens.weight differs between rank 0 and rank 1" in first


def test_noise_that_each_rank_draws(ranks: Any) -> None:
    first, _ = ranks(2).run(fitted, DrawsNoise(), "ddp_custom", 2)
    assert "after step 1, " in first
    assert "they were equal after step 0" in first


class ExportsAtTheEnd(Callback):
    """Rank 0 makes of its copy what it exports."""

    def on_train_end(self, trainer: L.Trainer, module: Any) -> None:
        if trainer.global_rank == 0:
            module.get_parameter(SPOILED).data.zero_()


def test_what_is_exported_at_the_end_is_the_rank_s_own(ranks: Any) -> None:
    assert ranks(2).run(fitted, ExportsAtTheEnd(), "ddp_custom", 2) == ["", ""]


def test_a_difference_is_found_at_the_next_look(ranks: Any) -> None:
    """Before steps 5 to 7 nobody looks."""
    first, _ = ranks(2).run(fitted, Spoils(5), "ddp_custom", 2, num_steps=9)
    assert "after step 7, " in first
    assert "they were equal after step 3" in first


def test_rounding_is_told_and_ends_nothing(ranks: Any) -> None:
    for said, told in ranks(2).run(told_of_rounding, Spoils(2, by=1e-6)):
        assert said == ""
        assert len(told) == 1
        assert f"ranks hold values of {SPOILED} that differ by rounding" in told[0]


def told_of_rounding(callback: Any) -> tuple[str, list[str]]:
    told: list[str] = []
    with mock.patch.object(equal_copies, "rank_zero_info", told.append):
        # Nothing but this parameter differs: no gradient is large enough to make others so.
        said = fitted(callback, "ddp_custom", 2, num_steps=3)
    return said, told


def test_nobody_looks_who_is_told_not_to(ranks: Any) -> None:
    assert ranks(2).run(fitted, Spoils(3), "ddp_custom:check=off", 2) == ["", ""]


def test_when_ranks_are_compared() -> None:
    copies = equal_copies.EqualCopies(ByteGPT(), torch.device("cpu"))
    looks = []
    with mock.patch.object(copies, "compare") as compare:
        for step in range(1, 3001):
            compare.reset_mock()
            copies.look()
            looks += [step] * compare.call_count
    assert looks == [1, 2, 3, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048]

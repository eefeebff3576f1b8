"""The rank for which others wait is named, and no other one."""

from __future__ import annotations

from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, default_collate

from lightning_parallel.callbacks import StepBreakdown, metered_steps
from lightning_parallel.callbacks.breakdown_windows import straggler
from lightning_parallel.callbacks.strategy_protocol import waiting_phases
from tests.data import data_of
from tests.jobs.meters import Long, Ticks, heard, spend
from tests.models.cases import LENGTH, ByteGPT
from tests.names import num_readers
from tests.parity import trainer_for


class OneIsSlow(ByteGPT):
    """Each step takes some time, and on rank 1 more."""

    more = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        spend(10 + self.more * dist.get_rank())
        return super().training_step(batch, batch_idx)


class OneComputesLong(OneIsSlow):
    more = 3


class OneHooksLong(OneIsSlow):
    """Rank 0 works on behind the last collective of backward, and the other one waits for it in the next step."""

    def on_after_backward(self) -> None:
        spend(3 * (1 - dist.get_rank()))


def one_reads_long(samples: Any) -> Any:
    spend(3 * dist.get_rank())
    return default_collate(samples)


class OneGoesLongBackward(OneIsSlow):
    """Rank 0 is slow in the first backward of two, which reduces nothing: all ranks wait for it before the next."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return Long.apply(loss, 8.0) if batch_idx % 2 == dist.get_rank() == 0 else loss


def named_ranks(strategy: str, make: Any, collate: Any = None, microsteps: int = 1) -> list[str]:
    """What was said on this rank about slow ones."""
    L.seed_everything(3, verbose=False)
    samples = 5 * microsteps * 8 * num_readers(strategy, 2)
    data = DataLoader(data_of("byte_gpt", samples, 8), batch_size=8, collate_fn=collate)
    meter = StepBreakdown(every=1)
    with heard() as said, mock.patch.object(metered_steps, "build_clock", return_value=Ticks()):
        trainer_for(strategy, 2, callbacks=[meter], accumulate_grad_batches=microsteps).fit(make(), data)
    return [each for each in said if "is slow" in each]


@pytest.mark.parametrize(
    ("name", "make", "collate", "slow", "median", "phase"),
    [
        ("ddp_custom", OneComputesLong, None, "rank 1 is slow: by itself it takes 1.3e+04 ms", "1e+04 ms", "forward"),
        ("ddp_custom", OneHooksLong, None, "rank 0 is slow: by itself it takes 1.3e+04 ms", "1e+04 ms", "other"),
        ("fsdp_custom", OneIsSlow, one_reads_long, "rank 1 is slow: by itself it takes 3e+03 ms", "0 ms", "data"),
        ("fsdp_custom", OneComputesLong, None, *[None] * 3),  # ranks wait in forward for each other: nobody is named
        ("ddp_custom", OneIsSlow, None, *[None] * 3),
        ("pp_custom", OneIsSlow, None, *[None] * 3),
    ],
)
def test_the_slow_rank_is_named(
    ranks: Any, name: str, make: Any, collate: Any, slow: str | None, median: str | None, phase: str | None
) -> None:
    said, by_others = ranks(2).run(named_ranks, name, make, collate)
    assert by_others == []
    words = f"StepBreakdown: {slow} of a step, and ranks in the median {median}; most of the difference is in {phase}"
    assert said == ([] if slow is None else [words])


def test_a_slow_backward_that_reduces_nothing(ranks: Any) -> None:
    """It is a rank's own where each has the whole module: others wait for it in time that is theirs otherwise."""
    (said,), by_others = ranks(2).run(named_ranks, "ddp_custom", OneGoesLongBackward, None, 2)
    assert by_others == []
    assert "rank 0 is slow: by itself it takes 2.8e+04 ms of a step, and ranks in the median 2e+04 ms" in said
    assert said.endswith("in backward without reduction")
    assert ranks(2).run(named_ranks, "fsdp_custom", OneGoesLongBackward, None, 2) == [[], []]


def streamed_phases(strategy: str) -> list[str]:
    """The phases in which ranks wait, where nobody knows the length of the loader."""

    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter([(torch.full((LENGTH,), dist.get_rank()),)] * 16)

    seen: list[str] = []

    class Look(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
            seen[:] = sorted(waiting_phases(trainer) or ())

    trainer_for(strategy, 2, callbacks=[Look()]).fit(ByteGPT(), DataLoader(Stream(), batch_size=8))
    return seen


def test_ranks_that_meet_for_batches_wait_in_data(ranks: Any) -> None:
    assert ranks(2).run(streamed_phases, "fsdp_custom")[1] == ["backward", "checkpoint", "data", "forward", "other"]


def test_who_is_a_straggler() -> None:
    usual = {"data": 0.01, "forward": 0.1, "backward": 0.2}
    slow, waiting = {**usual, "forward": 0.14}, ("backward",)
    assert straggler([usual, usual, slow, usual], waiting, 0.2).rank == 2
    assert straggler([usual, slow], waiting, 0.2).phase == "forward"
    assert straggler([usual, slow], ("backward", "forward"), 0.2) is None
    assert straggler([usual, slow], waiting, 0.5) is None
    assert straggler([{"data": 0.001, "backward": 1.0}, {"data": 0.002, "backward": 1.0}], waiting, 0.2) is None

"""An error on one rank: the others end soon, and say which rank it was and why."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lightning_parallel.strategies import failures
from lightning_parallel.strategies.neighbours import Neighbours
from lightning_parallel.strategies.stillness import Stillness
from tests.data import loader
from tests.models.pipelined import DeepTied
from tests.names import num_readers
from tests.parity import trainer_for
from tests.rank_pool import RankError


class Fails(DeepTied):
    """Raises on given ranks: in the second step, or in a hook."""

    def __init__(self, words: dict[int, str], where: str, wait: float = 0.0) -> None:
        super().__init__()
        self.words, self.where, self.wait = words, where, wait

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.fail("step", batch_idx)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.fail("hook", batch_idx)

    def fail(self, where: str, batch_idx: int) -> None:
        if where == self.where and batch_idx == 1 and self.global_rank in self.words:
            time.sleep(self.wait * self.global_rank)
            raise ValueError(self.words[self.global_rank])


def fit(strategy: str, words: dict[int, str], where: str = "step", wait: float = 0.0) -> list[str]:
    """Fit with a short grace; the error of this rank, with its notes."""
    module = Fails(words, where, wait)
    trainer = trainer_for(strategy, 2)
    with mock.patch.object(failures, "GRACE", 0.5), mock.patch.object(failures, "POLL", 0.2):
        try:
            trainer.fit(module, loader(num_readers(strategy, 2)))
        except ValueError as error:
            return [str(error), *getattr(error, "__notes__", [])]
    return []


@pytest.mark.parametrize(
    ("name", "where"), [("ddp_custom", "step"), ("fsdp_custom", "hook"), ("tp_custom", "step"), ("pp_custom", "step")]
)
def test_a_rank_that_waits_in_vain_ends(name: str, where: str, ranks: Any) -> None:
    began = time.monotonic()
    with pytest.raises(RankError) as caught:
        ranks(2).run(fit, name, {1: "planted"}, where)
    assert time.monotonic() - began < 60  # a collective waits for 30 minutes
    assert "rank 1 raised ValueError: planted. Rank 0 waits for it in vain, and ends." in str(caught.value)
    assert "rank 0 died with exit code 1" in str(caught.value)


def fit_with_grace(strategy: str) -> None:
    """Rank 1 raises behind its loss, and rank 0 waits for its gradient."""
    trainer_for(strategy, 2).fit(Fails({1: "planted"}, "step"), loader(num_readers(strategy, 2)))


def test_a_rank_that_stands_still_ends_before_its_grace_is_over(ranks: Any) -> None:
    pool = ranks(2)
    began = time.monotonic()
    with pytest.raises(RankError, match=r"rank 1 raised ValueError: planted. Rank 0 waits for it in vain|exit code 1"):
        pool.run(fit_with_grace, "pp_custom")
    assert time.monotonic() - began < failures.GRACE - 5


def moves(seconds: float, *, computes: bool = False, saves: bool = False) -> bool:
    """Whether a thread counts as one that stands still, while it waits, computes, or waits in a save."""
    is_over, began = threading.Event(), threading.Event()

    def wait() -> None:
        began.set()
        while computes and not is_over.is_set():
            torch.eye(200).inverse()
        is_over.wait()

    def save_checkpoint() -> None:
        wait()

    thread = threading.Thread(target=save_checkpoint if saves else wait)
    thread.start()
    began.wait()
    assert thread.ident is not None
    stillness, end = Stillness(thread.ident), time.monotonic() + 4 * seconds
    try:
        while time.monotonic() < end:
            if stillness.has_lasted(seconds):
                return False
            time.sleep(seconds / 5)
        return True
    finally:
        is_over.set()
        thread.join()


def test_who_computes_or_saves_does_not_stand_still() -> None:
    assert not moves(1.0)
    assert moves(1.0, computes=True)
    assert moves(1.0, saves=True)


def test_the_later_error_names_the_first(ranks: Any) -> None:
    first, second = ranks(2).run(fit, "ddp_custom", {0: "early", 1: "late"}, "step", 0.3)
    assert first == ["early"]
    assert second == ["late", "Before that, rank 0 raised ValueError: early"]


def test_equal_errors_need_no_note(ranks: Any) -> None:
    assert ranks(2).run(fit, "fsdp_custom", {0: "both", 1: "both"}) == [["both"], ["both"]]


def again(strategy: str) -> list[bool]:
    """A fit after one that failed on both ranks, and whether no thread is left, which Python could not end."""
    fit(strategy, {0: "both", 1: "both"})
    module = DeepTied()
    trainer = trainer_for(strategy, 2)
    before = [parameter.detach().clone() for parameter in module.parameters()]
    trainer.fit(module, loader(2))
    is_trained = not torch.equal(before[0], next(iter(module.parameters())))
    return [is_trained, not any(thread.name == "rank-failures" for thread in threading.enumerate())]


def test_a_process_that_has_caught_an_error_fits_again(ranks: Any) -> None:
    assert ranks(2).run(again, "ddp_custom") == [[True, True]] * 2


def fit_beside_a_dead_rank(strategy: str) -> None:
    """Rank 1 is killed in its second step, and rank 0 waits for it in something that no collective ends."""

    class Dies(DeepTied):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 1:
                if self.global_rank == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(100)
            return super().training_step(batch, batch_idx)

    with mock.patch.object(failures, "GRACE_OF_DEAD", 0.2), mock.patch.object(failures, "POLL", 0.1):
        trainer_for(strategy, 2).fit(Dies(), loader(num_readers(strategy, 2)))


def test_a_rank_that_waits_for_a_dead_one_ends(ranks: Any) -> None:
    with pytest.raises(RankError) as caught:
        ranks(2).run(fit_beside_a_dead_rank, "ddp_custom", deadline=60)
    assert "rank 0 died with exit code 1" in str(caught.value)
    assert "rank 1 died without an error (process" in str(caught.value)
    assert "Rank 0 waits for it in vain, and ends." in str(caught.value)


def fit_without_the_first_rank() -> None:
    """Rank 0 is killed, and the store with it; rank 1 waits for rank 2 in a group that has no connection to rank 0."""

    class Dies(DeepTied):
        def on_train_start(self) -> None:
            self.pair = dist.new_group([1, 2])

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                if self.global_rank == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                if self.global_rank == 1:
                    dist.all_reduce(torch.ones(3), group=self.pair)
                time.sleep(100)

    with mock.patch.object(failures, "GRACE_OF_DEAD", 0.5), mock.patch.object(failures, "POLL", 0.1):
        trainer_for("ddp_custom", 4).fit(Dies(), loader(4))


def test_a_rank_that_waits_in_a_collective_without_the_store_ends(ranks: Any) -> None:
    with pytest.raises(RankError) as caught:
        ranks(4).run(fit_without_the_first_rank, deadline=60)
    assert "rank 0 died with exit code -9" in str(caught.value)
    assert "the store in which ranks meet is gone, and with it the process that has kept it: rank 0" in str(
        caught.value
    )
    assert "Rank 1 waits in vain in all_reduce of [3], number 1 of group" in str(caught.value)
    assert "rank 1 died with exit code 1" in str(caught.value)


def test_only_a_process_that_is_gone_without_leave_is_dead() -> None:
    store = dist.HashStore()
    first = Neighbours(store, "run", 0, 3)
    with subprocess.Popen(["sleep", "100"]) as other:
        with mock.patch.object(os, "getpid", return_value=other.pid):
            second = Neighbours(store, "run", 1, 3)
        assert first.gone() == second.gone() == []
        other.kill()
        while first.gone() != [(1, other.pid)]:  # nobody has asked for its status: it is dead, and still listed
            time.sleep(0.01)
    assert first.gone() == [(1, other.pid)]
    assert (first.is_running(1), second.is_running(0), first.is_running(2)) == (False, True, None)
    second.leave()
    assert first.gone() == []


def test_in_one_process_nobody_watches() -> None:
    watch = failures.FailureWatch()
    watch.start(mock.Mock(world_size=1))
    watch.report(ValueError())
    watch.stop()

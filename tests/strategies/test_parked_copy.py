"""The copy with which a first step is compared is in host memory while the real step runs."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from lightning_parallel import build_strategy
from lightning_parallel.strategies import first_step, parked_copy
from lightning_parallel.strategies.parked_copy import ParkedCopy
from tests.data import batches
from tests.jobs.first_steps import compared, fit, said
from tests.models.cases import GAN, LENGTH, ByteGPT
from tests.models.faults import FailsOnCopyOfRank0, OtherLayer
from tests.names import num_ranks, num_readers
from tests.parity import TOLERANCE, make_trainer, once, train_module, worst
from tests.rank_pool import RankError


@contextmanager
def apart() -> Iterator[list[Tensor]]:
    """The host as a device with memory of its own: what is parked is lost to whoever uses it, until it is fetched."""
    kept: dict[int, Tensor] = {}
    moved: list[Tensor] = []

    def to_host(data: Tensor) -> Tensor:
        lost = torch.full_like(data, torch.nan if data.is_floating_point() else 1)
        kept[lost.data_ptr()] = data
        moved.append(lost)
        return lost

    def to_device(data: Tensor, device: torch.device) -> Tensor:
        return kept.pop(data.data_ptr()).clone() if data.numel() else data  # other memory than before

    with (
        mock.patch.object(parked_copy, "has_own_memory", return_value=True),
        mock.patch.object(parked_copy, "to_host", to_host),
        mock.patch.object(parked_copy, "to_device", to_device),
    ):
        yield moved


def fitted(make: Any, case: str, strategy: str, num: int, readers: int, **options: Any) -> tuple[Any, list[str], int]:
    """The outcome, what is said of the first step, and how many tensors were parked."""
    with apart() as moved:
        outcome, lines = fit(make, case, strategy, num, readers, **options)
    return outcome, lines, len(moved)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", ["ddp_custom", "fsdp_custom", "tp_custom", "pp_custom", "cp_custom"])
def test_what_is_parked_is_fetched_before_it_is_used(ranks: Any, name: str, accumulate: int) -> None:
    size = num_ranks(name)
    readers = num_readers(name, size)
    options = {"accumulate_grad_batches": accumulate}
    expected = once(train_module, ByteGPT, batches("byte_gpt", 1), "auto", 1, **options)
    found = ranks(size).run(fitted, ByteGPT, "byte_gpt", name, size, readers, **options)
    outcome, lines, _ = found[0]
    assert lines[-1].startswith("first step equals one process"), lines
    assert all(num_parked > 10 for *_, num_parked in found)
    assert worst(outcome, expected) <= TOLERANCE


def test_a_step_that_differs_is_run_again(ranks: Any) -> None:
    """Where the copy is used once more, to say where."""
    with pytest.raises(RankError, match=r"the output of 'model\.blocks\.1' is the first to differ"):
        ranks(2).run(fitted, OtherLayer, "byte_gpt", "fsdp_custom", 2, 2)


def test_a_step_that_optimizes_by_itself_keeps_the_copy(ranks: Any) -> None:
    found = ranks(2).run(fitted, GAN, "gan", "fsdp_custom", 2, 2)
    assert found[0][1][-1].startswith("first step equals one process"), found[0][1]
    assert all(num_parked == 0 for *_, num_parked in found)


def test_the_host_parks_nothing() -> None:
    tensor = torch.ones(3)
    parked = ParkedCopy(torch.device("cpu"))
    place = tensor.data_ptr()
    parked.park(nn.Module(), nn.Module(), [tensor])
    parked.fetch()
    assert tensor.data_ptr() == place


def test_a_tensor_that_is_there_twice_is_moved_once() -> None:
    tensor, table = torch.ones(3), torch.ones(3).to_sparse()
    parked = ParkedCopy(torch.device("cpu"))
    with apart() as moved:
        parked.park(nn.Module(), nn.Module(), [tensor, table, tensor])
        assert len(moved) == 1
        assert torch.isnan(tensor).all()
        parked.fetch()
        parked.fetch()
    assert tensor.eq(1).all()


class RunsOutOfMemory(FailsOnCopyOfRank0):
    """The step of the copy has computed something when it fails."""

    computed: ClassVar[list[Any]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.is_original != [id(self)]:
            states = torch.ones(1000)
            self.computed[:] = [weakref.ref(states)]
            raise torch.OutOfMemoryError("no room for another 1000 GiB")
        return super().training_step(batch, batch_idx)


def left_by_a_copy() -> tuple[list[str], list[bool]]:
    """What is said, and whether nothing is left where the memory of the device is released."""
    was_freed: list[bool] = []

    def release(_: torch.device) -> None:
        was_freed.append(RunsOutOfMemory.computed[0]() is None)

    with mock.patch.object(first_step, "release_cached", release):
        _, lines = fit(RunsOutOfMemory, "byte_gpt", "fsdp_custom", 2, 2)
    return lines, was_freed


def test_what_a_failed_copy_has_computed_is_freed(ranks: Any) -> None:
    found = ranks(2).run(left_by_a_copy)
    assert len(found[0][0]) == 1
    assert "raised OutOfMemoryError: no room for another 1000 GiB" in found[0][0][0]
    assert [was_freed for _, was_freed in found] == [[True], [True]]


class LeavesOneOut(ByteGPT):
    """The second step has no backward; Lightning updates behind it."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) if batch_idx != 1 else None


class Shared(nn.Linear):
    """Frozen, and the same in each copy of what holds it."""

    def __deepcopy__(self, memo: Any) -> Shared:
        return self


class Distilled(ByteGPT):
    """Has a teacher that its copies share."""

    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__(optimizer)
        self.teacher = Shared(LENGTH, 1).requires_grad_(False)

    def loss(self, tokens: Tensor) -> Tensor:
        return super().loss(tokens) + 0 * self.teacher(tokens.float()).mean()


class ViewsABuffer(ByteGPT):
    """Writes into a buffer through a view that it has taken of it in an earlier step."""

    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__(optimizer)
        self.register_buffer("queue", torch.zeros(2, 3))
        self.row: Tensor | None = None

    def loss(self, tokens: Tensor) -> Tensor:
        if self.row is None:
            self.row = self.queue[0]
        self.row += 1
        return super().loss(tokens) + self.queue.sum()


@pytest.mark.parametrize("make", [LeavesOneOut, Distilled, ViewsABuffer])
def test_what_a_step_does_with_its_tensors(ranks: Any, make: Any) -> None:
    lines, num_parked = ranks(1).run(said_of_a_window, make)[0]
    assert lines[-1].startswith("first step equals one process"), lines
    assert num_parked > 10


def said_of_a_window(make: Any) -> tuple[list[str], int]:
    with apart() as moved, said() as lines, compared():
        strategy = build_strategy("ddp_custom:recompute=full")
        make_trainer(strategy, 1, accumulate_grad_batches=2).fit(make(), batches("byte_gpt", 1))
    return lines, len(moved)


class LogsTheTime(ByteGPT):
    """Logs something else each time that it runs, so that both steps run again to see that."""

    times: ClassVar[list[float]] = []
    was_parked: ClassVar[list[bool]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.times.append(len(self.times))
        self.log("time", self.times[-1])
        return super().training_step(batch, batch_idx)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        window = self.trainer.strategy.first_step._window
        if window is not None:  # between the real step and its backward
            self.was_parked.append(bool(window._parked._away))


def parked_before_backward() -> tuple[list[str], list[bool]]:
    _, lines, _ = fitted(LogsTheTime, "byte_gpt", "fsdp_custom", 2, 2)
    return lines, LogsTheTime.was_parked


def test_the_copy_is_parked_again_behind_another_run(ranks: Any) -> None:
    found = ranks(2).run(parked_before_backward)
    assert found[0][0][-1].startswith("first step equals one process")
    assert [was_parked for _, was_parked in found] == [[True], [True]]


class RunsOutOfMemoryAgain(LogsTheTime):
    """The third run of a step is that of the copy, for the second time."""

    times: ClassVar[list[float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if len(self.times) == 2 and self.global_rank == 1:
            self.times.append(2)
            raise torch.OutOfMemoryError("no room beside the real step")
        return super().training_step(batch, batch_idx)


def test_another_run_for_which_there_is_no_memory(ranks: Any) -> None:
    outcome, lines, _ = ranks(2).run(fitted, RunsOutOfMemoryAgain, "byte_gpt", "fsdp_custom", 2, 2)[0]
    assert len(lines) == 1
    assert lines[0].startswith("first step not compared with one process: ")
    expected = once(train_module, ByteGPT, batches("byte_gpt", 1), "auto", 1)
    assert worst(outcome, expected) <= TOLERANCE


def test_a_host_without_room(ranks: Any) -> None:
    tensor = torch.ones(3)
    with apart() as moved, mock.patch.object(parked_copy, "free_memory", return_value=7 * tensor.nbytes):
        ParkedCopy(torch.device("cpu"), num_processes=4).park(nn.Module(), nn.Module(), [tensor])
        assert not moved
        ParkedCopy(torch.device("cpu"), num_processes=3).park(nn.Module(), nn.Module(), [tensor])
        assert len(moved) == 1

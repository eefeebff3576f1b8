"""Batches of a cell, tokens, and the steps that are timed and counted."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, TensorDataset

from lightning_parallel.bench import loop
from lightning_parallel.bench.loop import LoopSettings, train_loop
from lightning_parallel.bench.stopwatch import Measured, Stopwatch, Timing
from lightning_parallel.bench.trained import resized
from lightning_parallel.callbacks.batch_geometry import num_tokens
from lightning_parallel.errors import ConfigurationError
from tests.models import cli_module


def loader(**kwargs: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(24)), **{"batch_size": 4, "drop_last": True, **kwargs})


def test_the_global_batch_is_shared_by_those_who_read() -> None:
    given = loader(shuffle=True)
    assert resized(given, 2, 2) is given
    for batches, readers, size in ((1, 2, 2), (2, 1, 8), (1, 4, 1)):
        found = resized(given, batches, readers)
        assert (found.batch_size, found.drop_last, found.dataset) == (size, True, given.dataset)
        assert isinstance(found.sampler, RandomSampler)


def test_batches_that_cannot_be_shared_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"global batch of 4 samples does not divide over 3 ranks; give"):
        resized(loader(), 1, 3)
    for other in (
        loader(batch_size=None, drop_last=False),
        [1, 2],
        loader(batch_sampler=[[0]], batch_size=1, drop_last=False),
    ):
        assert resized(other, 2, 2) is other
        with pytest.raises(ConfigurationError, match="without a batch_size"):
            resized(other, 1, 2)


def test_a_stream_has_no_order_to_keep() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(range(8))

    assert [len(batch) for batch in resized(DataLoader(Stream(), batch_size=4), 1, 2)] == [2] * 4


@pytest.mark.parametrize(
    ("batch", "tokens"),
    [
        (torch.zeros(2, 5, dtype=torch.long), 10),
        ([torch.zeros(2, 3), torch.zeros(2, 7, dtype=torch.int32)], 14),
        ({"labels": torch.zeros(2, 9, dtype=torch.long), "input_ids": torch.zeros(2, 5, dtype=torch.long)}, 10),
        ([torch.zeros(2, 3), torch.zeros(2, dtype=torch.long)], None),
    ],
)
def test_tokens_are_integers_of_samples(batch: Any, tokens: int | None) -> None:
    assert num_tokens(batch, 2) == tokens


def watch(timing: Timing) -> tuple[Stopwatch, list[Measured]]:
    timed: list[Measured] = []
    return Stopwatch(timing, timed.append), timed


def test_steps_are_timed_without_warm_up_and_without_those_that_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    found, timed = watch(Timing(warm_up=2, steps=3))
    seconds = [100.0, 100.0, 1.0, 2.0, 3.0, 100.0, 100.0]
    for duration in seconds:
        assert found.begin_step(torch.zeros(2, 5, dtype=torch.long), together=3)
        clock[0] += duration
    assert not found.begin_step(torch.zeros(2, 5, dtype=torch.long), together=3)
    assert found.measured is not None
    assert (found.measured.seconds, found.measured.samples, found.measured.tokens) == (2.0, 6, 30)
    assert found.measured.collectives == {}
    assert [each.collectives for each in timed] == [None]  # handed over before anything is counted


def train(module: Any, **settings: Any) -> Measured:
    found, _ = watch(Timing(warm_up=1, steps=3))
    arguments = LoopSettings(settings, rank=0, size=1)
    train_loop(module, cli_module.Data(), arguments, watch=found, global_batches=1)
    assert found.measured is not None
    return found.measured


def test_the_loop_trains() -> None:
    torch.manual_seed(0)
    module = cli_module.Module()
    before = [parameter.clone() for parameter in module.parameters()]
    measured = train(module, accumulate_grad_batches=2, gradient_clip_val=1.0)
    assert measured.samples == 8
    assert not any(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
    assert "log" not in vars(module)


def test_the_loop_says_what_it_does_not_train() -> None:
    class Manual(cli_module.Module):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

    class Two(cli_module.Module):
        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.parameters()), torch.optim.SGD(self.parameters())], []

    with pytest.raises(ConfigurationError) as caught:
        train(Manual(), precision="16-mixed")
    assert len(caught.value.violations) == 2
    with pytest.raises(ConfigurationError, match="there are 2; leave loop out"):
        train(Two())


class SetUp(cli_module.Module):
    """With its own loader, which needs what the hooks before it have made."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []

    def prepare_data(self) -> None:
        self.called.append("prepare_data")

    def setup(self, stage: str) -> None:
        self.called.append(f"setup {stage}")
        self.width = 4

    def configure_model(self) -> None:
        self.called.append("configure_model")
        self.extra = torch.nn.Linear(self.width, 1)

    def train_dataloader(self) -> Any:
        self.called.append("train_dataloader")
        return DataLoader(TensorDataset(torch.randn(16, self.width)), batch_size=4)


@pytest.mark.parametrize("data", [None, L.LightningDataModule()])
def test_the_loop_calls_the_hooks_in_the_order_of_a_trainer(data: L.LightningDataModule | None) -> None:
    module = SetUp()
    watched = Stopwatch(Timing(warm_up=1, steps=3), lambda measured: None)
    train_loop(module, data, LoopSettings({}, rank=0, size=1), watch=watched, global_batches=1)
    assert module.called == ["prepare_data", "setup fit", "configure_model", "train_dataloader"]


def test_the_loop_deals_out_batches_that_it_makes() -> None:
    settings = LoopSettings({}, rank=1, size=2)
    found = loop._loader(loader(shuffle=True), settings, 2)
    assert isinstance(found.sampler, DistributedSampler)
    assert (found.batch_size, found.drop_last, found.sampler.shuffle, found.sampler.rank) == (4, True, True, 1)
    of_others = DataLoader(TensorDataset(torch.arange(4)), batch_sampler=[[0, 1], [2, 3]])
    with pytest.raises(ConfigurationError, match="no batch_sampler; leave loop out"):
        loop._loader(of_others, settings, 2)


class Scheduled(cli_module.Module):
    """With a schedule that asks for the length of the run."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        self.total = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        self.optimizer = optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def test_the_loop_steps_the_schedule() -> None:
    module = Scheduled()
    train(module, max_epochs=3)
    assert module.total == 3 * 4
    assert module.optimizer.param_groups[0]["lr"] == 0.5**6  # of one step of warm-up, three timed, two counted

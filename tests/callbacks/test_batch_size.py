"""The size found is the largest that fits, the same on all ranks, and nothing else of the search is left."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from lightning_parallel import ConfigurationError, full_state_dict
from lightning_parallel.callbacks.batch_size import BatchSizeFinder
from lightning_parallel.callbacks.size_search import largest_fitting
from tests.data import data_of, loader
from tests.jobs.fits import messages
from tests.jobs.sized import LIMIT, SAMPLES, Eventful, Gauge, RunsOut, Sized, assert_same_run, train
from tests.models.cases import GAN, ByteGPT
from tests.parity import TOLERANCE, difference, trainer_for

STRATEGIES = ["ddp_custom", "zero1_custom", "fsdp_custom"]


class SizedGAN(GAN):
    """Manual optimization; the size is a hyperparameter."""

    def __init__(self, size: int = 2) -> None:
        super().__init__("adamw")
        self.save_hyperparameters()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        Gauge.note(torch.empty(2500), torch.empty(len(batch[0]), 500))
        return super().training_step(batch, batch_idx)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(data_of("gan", SAMPLES, 1), batch_size=self.hparams.size)


def brute_force(make: Any, budget: float) -> int:
    """The largest size within the budget on each rank, one after the other."""
    fitting = []
    for size in range(1, SAMPLES + 1):
        L.seed_everything(3, verbose=False)
        tokens = data_of("byte_gpt", size, 1)[:][0]
        Gauge.read(torch.device("cpu"))
        make().loss(tokens)
        fitting.append(_agreed(Gauge.read(torch.device("cpu"))) <= budget)
    assert fitting == sorted(fitting, reverse=True)
    return sum(fitting)


def _agreed(peak: int) -> int:
    if not dist.is_initialized():
        return peak
    box = torch.tensor(peak)
    dist.all_reduce(box, op=dist.ReduceOp.MAX)
    return int(box)


def run_all(ranks: Any, strategy: str, job: Any, *args: Any, **kwargs: Any) -> list[Any]:
    if strategy == "auto":
        return [job("auto", 1, *args, **kwargs)]
    size = 4 if strategy == "hsdp_custom" else 2
    return ranks(size).run(job, strategy, size, *args, **kwargs)


@pytest.mark.parametrize("strategy", ["auto", *STRATEGIES, "hsdp_custom"])
def test_largest_size_that_fits_any_rank(ranks: Any, strategy: str) -> None:
    found = run_all(ranks, strategy, train, Sized, {})
    sizes = {each["size"] for each in found}
    num_ranks = len(found)
    budget = LIMIT * 0.9
    expected = brute_force(Sized, budget) if strategy == "auto" else ranks(num_ranks).run(brute_force, Sized, budget)[0]
    assert sizes == {expected}
    assert expected == (13 if strategy == "auto" else 10)
    assert all(each["peaks"] == found[0]["peaks"] for each in found)
    assert max(found[0]["peaks"].values()) <= budget  # no trial ran into the wall

    fresh = run_all(ranks, strategy, train, functools.partial(Sized, expected), None)
    for ours, theirs in zip(found, fresh, strict=True):
        assert_same_run(ours, theirs)


@pytest.mark.parametrize("strategy", STRATEGIES[1:])
def test_training_equals_one_process_with_that_size(ranks: Any, strategy: str) -> None:
    find = {"memory_limit": 46_000}  # a size with which 96 samples make whole global batches
    found = ranks(2).run(train, strategy, 2, Sized, find)[0]
    assert found["size"] == 12
    reference = train("auto", 1, functools.partial(Sized, 24), None)
    assert difference(found["weights"], reference["weights"]) <= TOLERANCE
    assert found["losses"] == pytest.approx(reference["losses"], abs=TOLERANCE)


@pytest.mark.parametrize("strategy", ["auto", "zero1_custom", "fsdp_custom:accumulation_sync=last"])
def test_nothing_else_of_the_search_is_left(ranks: Any, strategy: str) -> None:
    """Random numbers, counters, lists, metrics, running statistics, and a schedule for the number of steps."""
    found = run_all(ranks, strategy, train, Eventful, {}, accumulate_grad_batches=2)
    size = found[0]["size"]
    assert size > 2
    fresh = run_all(ranks, strategy, train, functools.partial(Eventful, size), None, accumulate_grad_batches=2)
    for ours, theirs in zip(found, fresh, strict=True):
        assert_same_run(ours, theirs)


@pytest.mark.parametrize("strategy", ["auto", "ddp_custom", "fsdp_custom"])
def test_manual_optimization_and_hyperparameters(ranks: Any, strategy: str) -> None:
    found = run_all(ranks, strategy, train, SizedGAN, {"attribute": "size"})
    assert {each["size"] for each in found} == {13}
    for ours, theirs in zip(found, run_all(ranks, strategy, train, functools.partial(SizedGAN, 13), None), strict=True):
        assert_same_run(ours, theirs)


@pytest.mark.parametrize("strategy", ["auto", "fsdp_custom:accumulation_sync=last", "zero2_custom"])
def test_running_out_of_memory_on_all_ranks_goes_down(ranks: Any, strategy: str) -> None:
    settings = {"accumulate_grad_batches": 1 if strategy == "zero2_custom" else 2}
    found = run_all(ranks, strategy, train, RunsOut, {"memory_limit": 10**9}, **settings)
    assert {each["size"] for each in found} == {8}
    assert math.isinf(found[0]["peaks"][16])
    fresh = run_all(ranks, strategy, train, functools.partial(RunsOut, 8), None, **settings)
    for ours, theirs in zip(found, fresh, strict=True):
        assert_same_run(ours, theirs)


@pytest.mark.parametrize("strategy", ["ddp_custom"])
def test_running_out_of_memory_under_ddp_is_an_error(ranks: Any, strategy: str) -> None:
    found = ranks(2).run(messages, train, strategy, 2, RunsOut, {"memory_limit": 10**9})
    assert "batch_size=16 ran out of memory, and DDP cannot go on" in found[0][0]
    assert "maximum=8" in found[0][0]


@pytest.mark.parametrize("slope", [0.5, 7, 130.25])
@pytest.mark.parametrize("start", [2, 3, 8, 50])
def test_search_equals_trying_every_size(slope: float, start: int) -> None:
    for budget in (700, 1000, 5000):
        for maximum in (64, 8192):

            def peak(size: int) -> float:
                return 100 + slope * size

            expected = max((size for size in range(1, maximum + 1) if peak(size) <= budget), default=0)
            found, peaks = largest_fitting(peak, start=start, maximum=maximum, budget=budget)
            assert found == expected
            assert all(value <= budget for size, value in peaks.items() if size > start)


def test_search_where_peaks_bend() -> None:
    for power in (1.2, 2.0):
        peak = functools.partial(lambda power, size: 50 + size**power, power)
        found, peaks = largest_fitting(peak, start=2, maximum=8192, budget=1000)
        best = int(950 ** (1 / power))
        assert 0.8 * best < found <= best
        assert len(peaks) < 20
    assert largest_fitting(lambda size: 7, start=2, maximum=1000, budget=10)[0] == 1000
    assert largest_fitting(lambda size: 11, start=2, maximum=1000, budget=10)[0] == 0
    assert largest_fitting(lambda size: 5 if size < 3 else math.inf, start=8, maximum=99, budget=10)[0] == 2


def test_the_share_of_the_samples_is_the_most(ranks: Any) -> None:
    """With the package's own measure of memory, and more of it than any batch takes."""
    find = {"measure": None, "memory_limit": 2**45}
    for each in ranks(2).run(train, "fsdp_custom", 2, Sized, find):
        assert each["size"] == SAMPLES // 2
        assert all(peak > 10**6 for peak in each["peaks"].values())
    assert train("auto", 1, Sized, {**find, "maximum": 20})["size"] == 20


def default_limit(strategy: str, num_ranks: int) -> tuple[int, list[float]]:
    found = train(strategy, num_ranks, Sized, {"memory_limit": None, "measure": None, "maximum": 4})
    return found["size"], list(found["peaks"].values())


def test_the_limit_is_the_share_of_the_host(ranks: Any) -> None:
    assert [size for size, _ in ranks(2).run(default_limit, "zero2_custom", 2)] == [4, 4]


def interrupted(strategy: str, num_ranks: int, path: str, resumed: bool) -> dict[str, Any]:
    """Two epochs; a checkpoint after the first, or from it on with another limit, which is not asked for."""
    L.seed_everything(3, verbose=False)
    limit = 10**9 if resumed else LIMIT
    finder = BatchSizeFinder(measure=Gauge.read, memory_limit=limit)

    class Save(L.Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, *args: Any) -> None:
            if trainer.current_epoch == 0 and not resumed:
                trainer.save_checkpoint(path)

    trainer = trainer_for(strategy, num_ranks, max_epochs=2, callbacks=[finder, Save()])
    trainer.fit(Sized(), ckpt_path=path if resumed else None)
    return {"size": finder.batch_size, "peaks": finder.peaks, "weights": full_state_dict(trainer)}


@pytest.mark.parametrize("strategy", ["auto", "fsdp_custom"])
def test_a_resumed_run_keeps_its_size(ranks: Any, tmp_path: Path, strategy: str) -> None:
    path = str(tmp_path / "saved.ckpt")
    whole = run_all(ranks, strategy, interrupted, path, False)[0]
    resumed = run_all(ranks, strategy, interrupted, path, True)[0]
    assert resumed["size"] == whole["size"]
    assert resumed["peaks"] == {}
    assert difference(resumed["weights"], whole["weights"]) <= TOLERANCE
    if strategy == "fsdp_custom":  # another number of ranks has another global batch and other memory: search again
        assert interrupted("auto", 1, path, True)["size"] == SAMPLES


class Data(L.LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.per_rank = 2

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(data_of("byte_gpt", SAMPLES, 1), batch_size=self.per_rank)


def test_size_of_a_datamodule() -> None:
    finder, data = BatchSizeFinder(attribute="per_rank", measure=Gauge.read, memory_limit=LIMIT), Data()
    module = ByteGPT("sgd")
    module.loss = lambda tokens: (
        Gauge.note(torch.empty(2500), torch.empty(len(tokens), 500)),
        ByteGPT.loss(module, tokens),
    )[1]
    trainer_for("auto", 1, callbacks=[finder]).fit(module, data)
    assert (finder.batch_size, data.per_rank) == (13, 13)


class Deaf(Sized):
    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(data_of("byte_gpt", SAMPLES, 1), batch_size=4)


def refused(strategy: str, num_ranks: int) -> list[str]:
    def words(module: Any, *loaders: Any, find: Any = None, **settings: Any) -> str:
        finder = BatchSizeFinder(**{"measure": Gauge.read, "memory_limit": LIMIT, **(find or {})})
        trainer = trainer_for(strategy, num_ranks, callbacks=[finder], **settings)
        return " | ".join(messages(trainer.fit, module, *loaders))

    return [
        words(Sized(), find={"attribute": "batches"}),
        words(Sized(), loader(num_ranks)),
        words(Sized(), fast_dev_run=True),
        words(Deaf()),
        words(Sized(), find={"memory_limit": 12_000}),
    ]


@pytest.mark.parametrize("strategy", ["auto", "fsdp_custom"])
def test_refusals(ranks: Any, strategy: str) -> None:
    expected = [
        "neither Sized, its hyperparameters nor the datamodule has 'batches'",
        "loaders were passed to fit(), so no attribute changes their batch size",
        "fast_dev_run runs a batch of whatever size",
        "train_dataloader() makes batches of 4 for batch_size=2 and for batch_size=",
        "GiB, and may take 1.01e-05 GiB (memory_limit less 10%)",
    ]
    for words, found in zip(expected, run_all(ranks, strategy, refused)[0], strict=True):
        assert words in found


def test_settings_are_refused_in_words() -> None:
    with pytest.raises(ConfigurationError) as error:
        BatchSizeFinder(start=1, maximum=0, steps=0, memory_limit=0, margin=1.0)
    for words in ("start=1 must", "maximum=0 is less than start=1", "steps=0", "memory_limit=0", "margin=1.0"):
        assert words in str(error.value)

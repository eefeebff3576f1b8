"""`DevicePrefetch` changes no number, waits for no data that could be there, and leaves no thread."""

from __future__ import annotations

import copy
import functools
import random
import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor
from torch.utils.data import DataLoader, SubsetRandomSampler

from lightning_parallel import ConfigurationError
from lightning_parallel.callbacks import DevicePrefetch, StepBreakdown
from tests.jobs.positions import SaveAt
from tests.jobs.positions import fit as resumable
from tests.jobs.prefetched import Draws, Numbers, fit, threads
from tests.parity import difference, trainer_for

SAME = ("seen", "random")
PREFETCHED = [(2, [DevicePrefetch()]), (0, list[Callback]())]


def same(found: list[dict[str, Any]], plain: list[dict[str, Any]]) -> None:
    for ours, theirs in zip(found, plain, strict=True):
        assert {name: ours[name] for name in SAME} == {name: theirs[name] for name in SAME}
        assert all(torch.equal(ours["weights"][name], each) for name, each in theirs["weights"].items())
        assert ours["left"] == []


CASES: list[tuple[dict[str, Any], bool, str]] = [
    ({}, True, ""),
    ({"kind": "torch"}, False, "the data set, its sampler or what collates draws"),
    ({"kind": "numpy"}, False, "the data set, its sampler or what collates draws"),
    ({"kind": "python"}, False, "the data set, its sampler or what collates draws"),
    ({"draws": "python"}, False, "training draws from Python's or NumPy's"),
    ({"kind": "late torch"}, True, ""),
    ({"kind": "late dropout"}, True, ""),
    ({"kind": "late seeded"}, True, ""),
    ({"draws": "torch"}, True, ""),
    ({"kind": "stream", "limit_train_batches": 7}, True, ""),
    ({"kind": "stream", "max_steps": 9, "accumulate_grad_batches": 2, "limit_train_batches": 7}, True, ""),
    ({"num_workers": 1}, True, ""),
    ({"val_check_interval": 3}, True, ""),
    ({"sampler": lambda data: SubsetRandomSampler(range(40))}, True, ""),
]


@pytest.mark.parametrize(("case", "is_ahead", "said"), CASES)
def test_no_number_changes(case: dict[str, Any], is_ahead: bool, said: str) -> None:
    found, plain = (fit("auto", 1, ahead=ahead, **case) for ahead in (3, 0))
    same([found], [plain])
    assert bool(found["threads"]) == (is_ahead and "num_workers" not in case and case.get("kind") != "stream")
    assert len(found["said"]) == bool(said)
    assert all(said in each for each in found["said"])


@pytest.mark.parametrize("case", [{"kind": "late python"}, {"kind": "late numpy"}])
def test_draws_that_have_no_turns_end_the_fit(case: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="default generator was drawn from"):
        fit("auto", 1, ahead=2, **case)
    assert threads() == []


class DrawsAtTheEnd(Callback):
    """Draws where the thread has read all of an epoch, which harms nobody."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 11:
            random.random()


def test_draws_of_training_while_the_thread_rests() -> None:
    fit_with = [fit("auto", 1, ahead=ahead, callbacks=[DrawsAtTheEnd(), *also]) for ahead, also in PREFETCHED]
    same(fit_with[:1], fit_with[1:])


@pytest.mark.parametrize("name", ["ddp_custom", "fsdp_custom"])
def test_on_two_ranks(ranks: Any, name: str) -> None:
    pool = ranks(2)
    cases: list[dict[str, Any]] = [{}, {"kind": "late torch", "max_steps": 5}]
    for case in cases[: 1 + (name == "ddp_custom")]:
        same(*(pool.run(functools.partial(fit, name, 2, ahead=ahead, **case)) for ahead in (2, 0)))
    found = [pool.run(functools.partial(fit, name, 2, ahead=ahead, kind="uneven")) for ahead in (2, 0)]
    same(*found)  # ranks have different numbers of batches, which nobody knows
    assert [len(each["seen"]) for each in found[0]] == [2 * 2 * 10] * 2
    with pytest.raises(Exception, match="default generator was drawn from"):
        pool.run(functools.partial(fit, name, 2, ahead=2, kind="late numpy"))


@pytest.mark.parametrize(
    ("kind", "save"),
    [("shuffled", 2), ("shuffled", 8), ("buckets", 2), ("two", 5), ("cycle", 2), ("workers", 8), ("stateful", 2)],
)
def test_a_resume_goes_on_behind_what_was_trained_on(tmp_path: Path, kind: str, save: int) -> None:
    found = []
    for ahead in (0, 2):
        path = str(tmp_path / f"{ahead}.ckpt")
        also = [DevicePrefetch(ahead=ahead)] if ahead else []
        whole = resumable("ddp_custom", 1, path, kind=kind, callbacks=[SaveAt(path, save), *also])
        resumed = resumable("ddp_custom", 1, path, kind=kind, from_path=path, callbacks=[SaveAt("", 0), *also])
        assert resumed["seen"] == whole["seen"][save:]
        found.append((whole["seen"], resumed["seen"], whole["told"], resumed["told"]))
        assert difference(resumed["weights"], whole["weights"]) == 0
    assert found[0] == found[1]


class Broken(Numbers):
    def __getitem__(self, index: int) -> Any:
        if index == 30:
            raise KeyError("no sample 30")
        return super().__getitem__(index)


def test_an_error_of_the_loader_has_its_traceback() -> None:
    module = Draws()
    with pytest.raises(KeyError, match="no sample 30") as caught:
        trainer_for("auto", 1, callbacks=[DevicePrefetch()]).fit(module, DataLoader(Broken(), batch_size=4))
    assert "__getitem__" in [entry.name for entry in caught.traceback]
    assert any("DevicePrefetch" in note for note in caught.value.__notes__)
    assert len(module.seen) == 2 * 7  # the batches before it were trained on
    assert threads() == []


class Fails(Draws):
    error: type[BaseException] = RuntimeError

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 5:
            raise self.error("as asked")
        return super().training_step(batch, batch_idx)


class Interrupted(Fails):
    error = KeyboardInterrupt


def test_no_thread_is_left_behind_an_error_of_the_training() -> None:
    for make in (Fails, Interrupted):
        trainer = trainer_for("auto", 1, callbacks=[DevicePrefetch()])
        with pytest.raises((RuntimeError, SystemExit)):
            trainer.fit(make(), DataLoader(Numbers(), batch_size=4))
        assert threads() == []


class Copies(Callback):
    def __init__(self) -> None:
        self.copied: Any = None

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.copied = None
        self.copied = copy.deepcopy(trainer)


def test_a_trainer_is_copied() -> None:
    copies = Copies()
    trainer = trainer_for("auto", 1, callbacks=[DevicePrefetch(), copies])
    trainer.fit(Draws(), DataLoader(Numbers(), batch_size=4))
    assert threads() == []
    for callback in copies.copied.callbacks:
        callback.teardown(copies.copied, None, "fit")  # it has no thread of the other one's


class ReadsItself(Draws):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        batch, batch_idx, _ = next(dataloader_iter)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *args: Any) -> None:
        """Draw nothing."""


@pytest.mark.filterwarnings("ignore:Found `dataloader_iter`")
@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter`")
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_step_that_reads_by_itself(num_workers: int) -> None:
    seen = []
    for also in ([], [DevicePrefetch()]):
        L.seed_everything(3, verbose=False)
        module = ReadsItself()
        data = DataLoader(Numbers(), batch_size=4, shuffle=True, num_workers=num_workers)
        trainer_for("auto", 1, callbacks=also, max_epochs=2).fit(module, data)
        seen.append(module.seen)
    assert seen[0] == seen[1]
    assert threads() == []


STEP = 0.25
"""Seconds of a step; long, so that a busy machine adds little."""


def slow_collate(samples: list[Tensor]) -> Tensor:
    """Takes four fifths of a step for each batch."""
    time.sleep(0.8 * STEP)
    return torch.stack(samples)


class Computes(Draws):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        time.sleep(STEP)
        return super().training_step(batch, batch_idx)


def test_training_does_not_wait_for_a_data_set_that_is_faster() -> None:
    shares = []
    for also in ([], [DevicePrefetch()]):
        meter, found = StepBreakdown(every=3), list[float]()
        meter.listeners.append(lambda trainer, window, found=found: found.append(window.seconds["data"] / window.step))
        trainer = trainer_for("auto", 1, callbacks=[meter, *also], limit_train_batches=11)
        trainer.fit(Computes(), DataLoader(Numbers(), batch_size=4, collate_fn=slow_collate))
        shares.append(min(found))  # other work on this machine may add to a window
    assert shares[0] > 0.3
    assert shares[1] < 0.05


def test_arguments() -> None:
    with pytest.raises(ConfigurationError, match="no number of batches"):
        DevicePrefetch(ahead=0)

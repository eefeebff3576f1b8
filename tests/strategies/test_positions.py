"""A resume in the middle of an epoch reads every sample once, on any number of ranks."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from lightning_parallel.strategies.loader_lengths import has_exact_length
from lightning_parallel.strategies.positioned_batches import PositionedBatches, Start
from tests.jobs.positions import NUM_SAMPLES, SaveAt, fit
from tests.parity import TOLERANCE, difference

STEPS = 6
"""Batches of an epoch."""


def run(ranks: Any, name: str, *args: Any, **kwargs: Any) -> list[dict[str, Any]]:
    """On two ranks, or in this process."""
    if name.startswith("one:"):
        return [fit(name.removeprefix("one:"), 1, *args, **kwargs)]
    found: list[dict[str, Any]] = ranks(2).run(fit, name, 1 if name.startswith("pp_") else 2, *args, **kwargs)
    return found[:1] if name.startswith("pp_") else found


def samples(found: list[dict[str, Any]], epoch: int) -> list[int]:
    return sorted(each for rank in found for at, _, batch in rank["seen"] if at == epoch for each in batch)


@pytest.mark.parametrize("kind", ["shuffled", "sequential", "batches", "buckets", "weighted", "single", "uneven"])
@pytest.mark.parametrize("save", [2, STEPS + 3])
def test_the_rest_is_that_of_the_uninterrupted_run(ranks: Any, tmp_path: Path, kind: str, save: int) -> None:
    path = str(tmp_path / "middle.ckpt")
    whole = run(ranks, "ddp_custom", path, kind=kind, save=save)
    resumed = run(ranks, "ddp_custom", path, kind=kind, from_path=path)
    for ours, theirs in zip(resumed, whole, strict=True):
        assert ours["seen"] == theirs["seen"][save:]
        assert ours["drawn"] == theirs["drawn"][save:]
        assert ours["loaded"] == theirs["loaded"][-len(ours["loaded"]) :]  # what was read is not loaded again
        assert ours["told"] == []
    assert difference(resumed[0]["weights"], whole[0]["weights"]) == 0
    assert len(resumed[0]["seen"]) >= 3


@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        ("fsdp_custom", "one:ddp_custom"),
        ("fsdp_custom", "one:dp_custom"),
        ("one:ddp_custom", "ddp_custom"),
        ("one:dp_custom", "ddp_custom"),
        ("pp_custom", "ddp_custom"),
        ("ddp_custom", "pp_custom"),
    ],
)
@pytest.mark.parametrize("is_other", [False, True])
def test_other_ranks_read_what_is_left(ranks: Any, tmp_path: Path, writer: str, reader: str, is_other: bool) -> None:
    path = str(tmp_path / "middle.ckpt")
    whole = run(ranks, writer, path, save=2)
    read = [each for rank in whole for _, _, batch in rank["seen"][:2] for each in batch]
    size = (4 if reader == "ddp_custom" else 2) if is_other else 0
    resumed = run(ranks, reader, path, from_path=path, size=size)
    assert sorted(read + samples(resumed, 0)) == samples(resumed, 1) == list(range(NUM_SAMPLES))
    last = max(index for epoch, index, _ in resumed[0]["seen"] if epoch == 1)
    assert [index for epoch, index, _ in resumed[0]["seen"] if epoch == 0][-1] == last
    assert not any(rank["told"] for rank in resumed)
    if size == 0 and "dp_custom" not in (writer[4:], reader[4:]):
        assert difference(resumed[0]["weights"], whole[0]["weights"]) < TOLERANCE


@pytest.mark.parametrize("names", [("ddp_custom",) * 3, ("ddp_custom", "one:ddp_custom", "fsdp_custom")])
def test_a_second_resume_in_the_same_epoch(ranks: Any, tmp_path: Path, names: tuple[str, ...]) -> None:
    first, second = str(tmp_path / "first.ckpt"), str(tmp_path / "second.ckpt")
    whole = run(ranks, names[0], first, save=1)
    run(ranks, names[1], second, save=2, from_path=first)
    resumed = run(ranks, names[2], second, from_path=second)
    assert [rank["seen"] for rank in resumed] == [rank["seen"][3:] for rank in whole]
    assert difference(resumed[0]["weights"], whole[0]["weights"]) < TOLERANCE


class SavesAtEpochEnd(Callback):
    """Saves where `ModelCheckpoint` does without validation, in the first epoch."""

    def __init__(self, path: str) -> None:
        self.path, self.epochs = path, list[int]()

    def on_train_epoch_start(self, trainer: Any, *_: Any) -> None:
        self.epochs.append(trainer.current_epoch)

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("at_end", [False, True])
@pytest.mark.parametrize("more", [2, STEPS])
def test_a_second_resume_behind_the_end_of_an_epoch(tmp_path: Path, at_end: bool, more: int) -> None:
    """Lightning takes the next epoch for one that has begun, or reads one more batch of the one before."""
    first, second = str(tmp_path / "first.ckpt"), str(tmp_path / "second.ckpt")
    limits = {"max_epochs": -1, "max_steps": 2 * STEPS + 2}
    whole = fit(
        "ddp_custom", 1, first, save=STEPS, **limits, **({"callbacks": [SavesAtEpochEnd(first)]} if at_end else {})
    )
    saves, starts = SaveAt(second, more), SavesAtEpochEnd("")
    resumed = fit("ddp_custom", 1, second, from_path=first, **limits, callbacks=[saves, starts])
    assert (resumed["seen"], resumed["told"]) == (whole["seen"][STEPS:], [])
    assert resumed["drawn"] == whole["drawn"][STEPS:]
    assert starts.epochs == [1, 2]
    again = fit("ddp_custom", 1, second, from_path=second, **limits)
    assert (again["seen"], again["told"]) == (whole["seen"][STEPS + more :], [])
    assert again["drawn"] == whole["drawn"][STEPS + more :]
    assert difference(again["weights"], whole["weights"]) == 0


@pytest.mark.parametrize("kind", ["workers", "persistent"])
@pytest.mark.parametrize("name", ["ddp_custom", "dp_custom"])
@pytest.mark.parametrize("save", [2, STEPS, STEPS + 2])
def test_workers(tmp_path: Path, kind: str, name: str, save: int) -> None:
    """Behind the last batch of an epoch, too: Lightning lets workers read the order of epoch 0 there."""
    path = str(tmp_path / "middle.ckpt")
    whole = fit(name, 1, path, kind=kind, save=save)
    resumed = fit(name, 1, path, kind=kind, from_path=path)
    assert resumed["told"] == []
    if name == "ddp_custom":
        assert resumed["seen"] == whole["seen"][save:]
    epoch = int(save > STEPS)
    rest = [each for each in whole["seen"][save:] if each[0] == epoch]
    assert [each for each in resumed["seen"] if each[0] == epoch] == rest


@pytest.mark.parametrize("kind", ["two", "cycle", "longest"])
def test_several_loaders(ranks: Any, tmp_path: Path, kind: str) -> None:
    path = str(tmp_path / "middle.ckpt")
    for save in (2, 4) if kind != "two" else (2,):
        whole = run(ranks, "ddp_custom", path, kind=kind, save=save)
        resumed = run(ranks, "ddp_custom", path, kind=kind, from_path=path)
        assert [rank["seen"] for rank in resumed] == [rank["seen"][save:] for rank in whole]


def test_a_window_is_read_from_its_start(ranks: Any, tmp_path: Path) -> None:
    """The gradients of its first batches are in no checkpoint."""
    path = str(tmp_path / "middle.ckpt")
    whole = run(ranks, "ddp_custom", path, save=5, accumulate_grad_batches=3)
    resumed = run(ranks, "ddp_custom", path, from_path=path, accumulate_grad_batches=3)
    assert [rank["seen"] for rank in resumed] == [rank["seen"][3:] for rank in whole]
    assert difference(resumed[0]["weights"], whole[0]["weights"]) == 0
    assert resumed[0]["step"] == whole[0]["step"]


@pytest.mark.parametrize("reader", ["ddp_custom", "one:ddp_custom"])
def test_limited_epochs(ranks: Any, tmp_path: Path, reader: str) -> None:
    path = str(tmp_path / "middle.ckpt")
    whole = run(ranks, "ddp_custom", path, save=2, limit_train_batches=4)
    resumed = run(ranks, reader, path, from_path=path, limit_train_batches=4)
    for epoch in (0, 1):
        skipped = 2 if epoch == 0 else 0
        expected = [s for rank in whole for at, i, batch in rank["seen"] if at == epoch and i >= skipped for s in batch]
        assert samples(resumed, epoch) == sorted(expected)


def test_loaders_with_states(ranks: Any, tmp_path: Path) -> None:
    """Lightning saves the state of rank 0 only."""
    path = str(tmp_path / "middle.ckpt")
    whole = run(ranks, "ddp_custom", path, kind="stateful", save=2)
    resumed = run(ranks, "ddp_custom", path, kind="stateful", from_path=path)
    assert [rank["seen"] for rank in resumed] == [rank["seen"][2:] for rank in whole]
    assert not any(rank["told"] for rank in resumed)
    (other,) = run(ranks, "one:ddp_custom", path, kind="stateful", from_path=path)
    assert len(other["told"]) == 1
    assert "states are those of 2 data ranks, where 1 read now" in other["told"][0]


def test_a_loader_that_counts_its_passes_begins_each_once(tmp_path: Path) -> None:
    path = str(tmp_path / "end.ckpt")
    whole = fit("ddp_custom", 1, path, kind="passes", save=STEPS)
    resumed = fit("ddp_custom", 1, path, kind="passes", from_path=path)
    assert resumed["seen"] == whole["seen"][STEPS:]
    assert resumed["drawn"] == whole["drawn"][STEPS:]


@pytest.mark.parametrize("name", ["ddp_custom", "one:dp_custom"])
def test_what_cannot_be_positioned_is_told(ranks: Any, tmp_path: Path, name: str) -> None:
    path = str(tmp_path / "middle.ckpt")
    run(ranks, name, path, kind="stream", save=2)
    resumed = run(ranks, name, path, kind="stream", from_path=path)
    assert len(resumed[0]["told"]) == 1
    assert "DataLoader of Stream, which has no indices" in resumed[0]["told"][0]
    run(ranks, name, path, save=2)
    resumed = run(ranks, name, path, kind="uneven", from_path=path)
    assert "it has 23 samples in place of 24" in resumed[0]["told"][0]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *itertools.product(["ddp_custom", "one:ddp_custom", "pp_custom", "fsdp_custom"], ["stream", "sized", "noisy"]),
        ("one:ddp_custom", "noisy in workers"),
    ],
)
def test_an_epoch_behind_a_resume_begins_as_any_other(ranks: Any, tmp_path: Path, name: str, kind: str) -> None:
    """Orders and samples that are drawn as the loader is read, and the numbers of batches."""
    path = str(tmp_path / "end.ckpt")
    is_read_by_each = kind in ("stream", "sized") and name in ("ddp_custom", "fsdp_custom")
    steps = 2 * STEPS if is_read_by_each else STEPS
    whole = run(ranks, name, path, kind=kind, save=steps)
    resumed = run(ranks, name, path, kind=kind, from_path=path)
    assert [rank["seen"] for rank in resumed] == [rank["seen"][steps:] for rank in whole]
    assert [rank["drawn"] for rank in resumed] == [rank["drawn"][steps:] for rank in whole]
    assert difference(resumed[0]["weights"], whole[0]["weights"]) == 0
    assert not resumed[0]["told"]


def test_hooks_draw_on_where_a_loader_begins_anew(tmp_path: Path) -> None:
    """Whatever the loader draws as it begins."""
    path = str(tmp_path / "middle.ckpt")
    whole = fit("ddp_custom", 1, path, kind="stream", save=2)
    resumed = fit("ddp_custom", 1, path, kind="stream", from_path=path)
    assert resumed["drawn"][: STEPS - 2] == whole["drawn"][2:STEPS]


def test_the_checkpoint_loads_without_the_package(ranks: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "middle.ckpt")
    run(ranks, "ddp_custom", path, save=2)
    saved = torch.load(path, weights_only=True)["lightning_parallel"]["position"]
    (entry,) = saved["loaders"]
    assert (saved["epoch"], entry["consumed"], entry["length"], entry["global_batch"]) == (0, 8, NUM_SAMPLES, 4)
    plain = fit("auto", 1, path, from_path=path)
    assert len(plain["seen"]) == 2 * STEPS - 2
    assert "not resumable" in plain["told"][0]
    fit("auto", 1, path, save=2)
    old = fit("ddp_custom", 1, path, from_path=path)
    assert old["seen"][0][:2] == (0, 2)
    assert "not resumable" in old["told"][0]


class _Pairs(BatchSampler):
    """A user's batch sampler, whose length nobody has checked."""


@pytest.mark.parametrize(("kind", "is_exact"), [(BatchSampler, True), (_Pairs, False)])
def test_lengths_are_trusted_as_without_a_position(kind: type[BatchSampler], is_exact: bool) -> None:
    data: Any = range(4)
    loader: DataLoader[Any] = DataLoader(data, batch_sampler=kind(SequentialSampler(data), 2, drop_last=False))
    assert has_exact_length(loader) is is_exact
    assert has_exact_length(PositionedBatches.given_to(loader, lambda _: Start(0))) is is_exact

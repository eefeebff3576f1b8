"""What hooks look at, copy, log and save: as in one process, or refused in words. Nothing that is not whole passes."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelPruning
from lightning.pytorch.loggers import TensorBoardLogger
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lightning_parallel import ConfigurationError, build_strategy, full_state_dict
from lightning_parallel.ranks import host_reads
from tests.data import GLOBAL_BATCH, loader_of
from tests.models import habits
from tests.names import num_readers
from tests.parity import TOLERANCE, Outcome, Recorder, is_moving, make_trainer, once, worst
from tests.rank_pool import RankError

NAMES = ("ddp_custom", "fsdp_custom", "tp_custom", "cp_custom", "pp_custom")
ALONE = 3.0
"""Seconds to wait for ranks that do not come."""


def fitted(make: Any, strategy: str, num_ranks: int, **kwargs: Any) -> tuple[list[float], Outcome, set[str]]:
    """What hooks have seen, how training went, and the types of what was logged."""
    L.seed_everything(3, verbose=False)
    module, recorder = make(), Recorder()
    built = strategy if strategy == "auto" else build_strategy(strategy)
    readers = num_readers(strategy.partition(":")[0], num_ranks)
    loader = loader_of("byte_gpt", steps=3, global_batch=GLOBAL_BATCH, num_ranks=readers)
    with mock.patch.object(host_reads, "DEADLINE", ALONE):
        trainer = make_trainer(built, num_ranks, callbacks=[recorder, *kwargs.pop("callbacks", [])], **kwargs)
        trainer.fit(module, loader)
    recorder.outcome.final = full_state_dict(trainer)
    return module.seen, recorder.outcome, {type(value).__name__ for value in trainer.callback_metrics.values()}


EQUAL: dict[Any, tuple[str, ...]] = {
    habits.GradientNormByHand: NAMES[:4],
    habits.GradientNormAfterBackward: NAMES[:4],
    habits.GradientNormStacked: NAMES[:4],
    habits.LightningNorms: NAMES,
    habits.WeightMeans: NAMES[:4],
    habits.AverageByHand: NAMES,
    habits.AverageByTorch: NAMES[:4],
    habits.LoadingIntoPart: NAMES,
    habits.AssigningData: NAMES,
    habits.ClippedByTorch: ("ddp_custom", "fsdp_custom", "tp_custom", "cp_custom"),
    habits.GradientData: NAMES,
    habits.DecayingGradients: ("ddp_custom", "zero2_custom", "fsdp_custom", "tp_custom", "cp_custom"),
    habits.TakingApart: NAMES,
    habits.ClippedByValue: ("fsdp_custom", "tp_custom"),
    habits.Unique: ("fsdp_custom", "tp_custom"),
    habits.Copying: ("ddp_custom",),
    habits.CopyingAtStart: ("ddp_custom",),
    habits.GoingBack: NAMES,
    habits.Masking: NAMES,
    habits.MoreBehindBackward: ("ddp_custom", "zero2_custom", "fsdp_custom", "tp_custom", "cp_custom"),
    habits.Sampling: NAMES,
    habits.Barrier: NAMES[:4],
    habits.TwoNames: NAMES,
}


@pytest.mark.parametrize(
    ("make", "strategy"),
    [(make, name) for make, names in EQUAL.items() for name in names],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_equal_to_one_process(ranks: Any, make: Any, strategy: str) -> None:
    seen, expected, _ = once(fitted, make, "auto", 1)
    assert is_moving(expected)
    found = ranks(2).run(fitted, make, strategy, 2)
    assert worst(found[0][1], expected) <= TOLERANCE
    for ours, _, types in found:
        assert ours == pytest.approx(seen, abs=TOLERANCE, rel=TOLERANCE)
        assert types <= {"Tensor"}


ONLY_ANOTHER_STAGE = r"at .*habits\.py:\d+ needs the value of .*which only another pipeline stage \(pipeline rank \d\)"
A_PART = r"at .*habits\.py:\d+ would copy this rank's part of a tensor"
REFUSED: list[tuple[Any, str, str]] = [
    (habits.GradientNormByHand, "pp_custom", "item " + ONLY_ANOTHER_STAGE),
    (habits.GradientNormAfterBackward, "pp_custom", "item " + ONLY_ANOTHER_STAGE),
    (habits.GradientNormStacked, "pp_custom", r"self\.log\('norm'\) " + ONLY_ANOTHER_STAGE),
    (habits.ClippedByTorch, "pp_custom", "writes what another pipeline stage .*gradient_clip_val"),
    (habits.WeightMeans, "pp_custom", "item " + ONLY_ANOTHER_STAGE),
    (habits.Copying, "fsdp_custom", "copy.deepcopy " + A_PART),
    (habits.Copying, "tp_custom", "copy.deepcopy " + A_PART),
    (habits.Copying, "cp_custom", "copy.deepcopy " + A_PART),
    (habits.Copying, "pp_custom", "copy.deepcopy " + ONLY_ANOTHER_STAGE),
    (habits.AverageByTorch, "pp_custom", r"For averages of weights, take the callback ExponentialMovingAverage"),
    (habits.Transposed, "fsdp_custom", "torch does not know how to compute this on parts of a tensor"),
    (habits.GradientHooks, "fsdp_custom", "parameters have hooks of their own, which sharding would not run"),
    (habits.GradientHooksAtStart, "fsdp_custom", r"register_hook at .*habits\.py:\d+ hooks a parameter"),
    (habits.Barrier, "pp_custom", r"strategy\.barrier\(\) at .*habits\.py:\d+ waits for all ranks inside of a step"),
    (habits.Broadcast, "pp_custom", r"strategy\.broadcast\(\) at .*habits\.py:\d+ waits for all ranks"),
]


@pytest.mark.parametrize(("make", "strategy", "words"), REFUSED, ids=lambda value: getattr(value, "__name__", value))
def test_refused_with_the_line_and_what_to_call(ranks: Any, make: Any, strategy: str, words: str) -> None:
    with pytest.raises(RankError) as caught:
        ranks(2).run(fitted, make, strategy, 2, deadline=20)
    assert re.search(words, str(caught.value)), str(caught.value)


def logged(make: Any, strategy: str, num_ranks: int, folder: str, **options: Any) -> None:
    fitted(make, strategy, num_ranks, logger=TensorBoardLogger(folder, **options))


@pytest.mark.parametrize("strategy", ["fsdp_custom", "tp_custom", "cp_custom", "pp_custom"])
def test_what_needs_a_whole_module_is_refused_before_it_begins(ranks: Any, strategy: str, tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"TensorBoardLogger\(log_graph=True\) runs the module on rank 0 only"):
        ranks(2).run(logged, habits.Graph, strategy, 2, str(tmp_path), log_graph=True)
    with pytest.raises(RankError, match="ModelPruning sorts and replaces whole parameters"):
        ranks(2).run(fitted, habits.Habit, strategy, 2, callbacks=[ModelPruning("l1_unstructured", amount=0.3)])


def test_what_needs_a_whole_module_runs_where_it_is_whole(ranks: Any, tmp_path: Path) -> None:
    ranks(2).run(logged, habits.Histograms, "ddp_custom", 2, str(tmp_path))
    ranks(2).run(fitted, habits.Habit, "ddp_custom", 2, callbacks=[ModelPruning("l1_unstructured", amount=0.3)])


@pytest.mark.parametrize(
    ("make", "strategy", "words"),
    [
        (habits.Saving, "fsdp_custom", "torch.save, or pickle, " + A_PART),
        (habits.Saving, "pp_custom", "torch.save, or pickle, " + ONLY_ANOTHER_STAGE),
        (
            habits.Histograms,
            "fsdp_custom",
            r"numpy at .*habits\.py:\d+ reads a tensor .* only 1 of them came to this line",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_rank_0_alone_is_refused(ranks: Any, make: Any, strategy: str, words: str, tmp_path: Path) -> None:
    """The other rank goes on, and waits for rank 0: here until the deadline of the job."""
    with pytest.raises(RankError) as caught:
        ranks(2).run(logged, make, strategy, 2, str(tmp_path), deadline=3 * ALONE)
    assert re.search(words, str(caught.value)), str(caught.value)


def fitted_in_windows(make: Any, strategy: str, num_ranks: int) -> tuple[list[float], Outcome, set[str]]:
    """The same with two microsteps for each update."""
    return fitted(make, strategy, num_ranks, accumulate_grad_batches=2)


@pytest.mark.parametrize("strategy", ["fsdp_custom", "zero2_custom", "tp_custom"])
@pytest.mark.parametrize("make", [habits.Masking, habits.MoreBehindBackward])
def test_in_each_microstep(ranks: Any, make: Any, strategy: str) -> None:
    _, expected, _ = once(fitted_in_windows, make, "auto", 1)
    assert worst(ranks(2).run(fitted_in_windows, make, strategy, 2)[0][1], expected) < TOLERANCE


def read_after_fit(strategy: str, num_ranks: int) -> list[float]:
    """What a hook kept, itself and in a copy."""
    modules: list[habits.Keeping] = []
    fitted(lambda: modules.append(habits.Keeping()) or modules[0], strategy, num_ranks)  # type: ignore[func-returns-value]
    norm, gradient, weight = copy.deepcopy(modules[0].kept)
    return [float(norm), float(gradient.norm()), float(weight.numpy().sum()), sum(gradient.flatten().tolist())]


@pytest.mark.parametrize("strategy", NAMES[:4])
def test_what_hooks_keep_is_whole_after_fit(ranks: Any, strategy: str) -> None:
    expected = once(read_after_fit, "auto", 1)
    for values in ranks(2).run(read_after_fit, strategy, 2):
        assert values == pytest.approx(expected, abs=TOLERANCE, rel=TOLERANCE)


def read_too_late() -> list[str]:
    """Rank 0 reads by itself; then all ranks, when they have parted."""
    module = habits.Keeping()
    fitted(lambda: module, "fsdp_custom", 2)
    mesh, words = init_device_mesh("cpu", (2,)), []
    own = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
    assert copy.deepcopy(own).to_local().numel() == 2, "a tensor that no run has made is as torch makes it"
    for is_reading, has_parted in ((mesh.get_rank() == 0, False), (True, True)):
        with mock.patch.object(dist, "is_initialized", return_value=not has_parted):
            try:
                if is_reading:
                    float(module.kept[1].norm())
            except ConfigurationError as error:
                words.append(str(error))
    return words


def test_what_hooks_keep_is_refused_where_it_cannot_be_whole(ranks: Any) -> None:
    first, second = ranks(2).run(read_too_late)
    assert re.search(r"item at .*test_habits\.py:\d+ reads a tensor .* only 1 of them came to this line", first[0])
    for words in (first[-1], second[-1]):
        assert re.search(r"item at .*test_habits\.py:\d+ reads a tensor of which .* the ranks have parted", words)


def saved_and_loaded(strategy: str, num_ranks: int, path: str) -> tuple[float, float]:
    """The scale of a module whose files have a version, after `fit`, and after a checkpoint of it was loaded."""
    found = []
    for steps, ckpt_path in ((2, None), (2, path)):  # the second fit has nothing left to train
        L.seed_everything(3, verbose=False)
        module = habits.WithVersion()
        trainer = make_trainer(build_strategy(strategy), num_ranks, max_steps=steps)
        readers = num_readers(strategy, num_ranks)
        loader = loader_of("byte_gpt", steps=3, global_batch=GLOBAL_BATCH, num_ranks=readers)
        trainer.fit(module, loader, ckpt_path=ckpt_path)
        trainer.save_checkpoint(path)
        found.append(float(module.versioned.scale.detach().sum()))
    return found[0], found[1]


@pytest.mark.parametrize("strategy", ["ddp_custom", "fsdp_custom"])
def test_versions_of_modules_are_kept(ranks: Any, strategy: str, tmp_path: Path) -> None:
    for before, after in ranks(2).run(saved_and_loaded, strategy, 2, str(tmp_path / "versioned.ckpt")):
        assert after == before
    state = torch.load(tmp_path / "versioned.ckpt", weights_only=True)["state_dict"]
    assert state._metadata["versioned"] == {"version": 2}

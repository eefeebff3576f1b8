"""Steps that call other layers on some ranks, or no layer at all: as one process, or an end in words."""

from __future__ import annotations

import itertools
import re
import time
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from lightning_parallel import RanksDifferError, build_strategy, full_state_dict
from lightning_parallel.module.unit_order import Calls
from lightning_parallel.steps import Steps
from tests.data import GLOBAL_BATCH, loader_of
from tests.jobs.first_steps import said
from tests.models.cases import Block, ByteGPT, HuggingFaceGPT2
from tests.models.layer_calls import (
    DropsALayer,
    DropsALayerLater,
    DropsALayerOnOneRank,
    DropsTheFirstLayer,
    DropsTheLastOnOneRank,
    NothingToValidate,
    PenalizedFeatures,
    TiedByFunction,
)
from tests.parity import TOLERANCE, Outcome, Recorder, is_moving, make_trainer, once, worst
from tests.rank_pool import RankError

DIFFER = r"call [12] of a sharded unit was model\.blocks\.\d on rank 0 and model\.blocks\.\d on rank 1"
CHECKED = "check=first_step"


def batches(readers: int, steps: int = 3) -> Any:
    return loader_of("byte_gpt", steps=steps, global_batch=GLOBAL_BATCH, num_ranks=readers)


def error_of(make: Any, strategy: str, num_ranks: int) -> tuple[str, int]:
    """The words with which a fit ends on this rank, and how many updates it had made."""
    trainer = make_trainer(build_strategy(strategy), num_ranks)
    with pytest.raises(RanksDifferError) as caught:
        trainer.fit(make(), batches(num_ranks))
    return str(caught.value), trainer.global_step


@pytest.mark.parametrize(
    ("make", "strategy", "updates"),
    [
        (DropsALayer, f"fsdp_custom:{CHECKED}", 0),
        (DropsALayer, "fsdp_custom:check=off", 0),
        (DropsTheFirstLayer, "fsdp_custom:check=off", 0),
        (DropsALayerLater, "fsdp_custom:check=off", 1),
        (DropsALayerLater, "zero2_custom:check=off", 1),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_ranks_that_call_different_layers_end_before_an_update(
    ranks: Any, make: Any, strategy: str, updates: int
) -> None:
    """Layers of one size: each rank would compute with half of the parameters of another layer, without a word."""
    for words, num_updates in ranks(2).run(error_of, make, strategy, 2):
        assert re.search(DIFFER, words), words
        assert num_updates == updates


def test_ranks_that_wait_for_each_other_end_in_words(ranks: Any) -> None:
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        ranks(2).run(error_of, DropsALayerOnOneRank, "fsdp_custom:check=off", 2)
    assert re.search(
        r"call 2 of a sharded unit was model\.blocks\.1 on rank 0 and model\.blocks\.2 on rank 1", str(caught.value)
    )
    assert time.monotonic() - start < 60


def test_a_rank_that_waits_behind_its_forward_is_seen(ranks: Any) -> None:
    """One has run its step and compares it with one process; the other waits in a layer that the first leaves out."""
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        ranks(2).run(error_of, DropsTheLastOnOneRank, "fsdp_custom", 2)
    assert "call 3 of a sharded unit was model.blocks.2 on rank 0 and the module on rank 1" in str(caught.value)
    assert time.monotonic() - start < 60


@pytest.mark.parametrize(
    ("own", "other", "is_wrong"),
    [
        (Calls(0, [0, 1], False), Calls(0, [0, 1, 2], False), False),
        (Calls(0, [0, 1], False), Calls(0, [0, 1, 2], True), False),
        (Calls(0, [0, 1], True), Calls(0, [0, 1, 2], False), True),
        (Calls(0, [0, 2], False), Calls(0, [0, 1], False), True),
        (Calls(0, [0, 2], False), Calls(1, [0, 1], False), False),
        (Calls(0, [0, 1, 3], False, True), Calls(0, [0, 1], False, False, [3, 2]), True),
        (Calls(0, [0, 1, 3], False, True), Calls(0, [0, 1], False, False, [3]), False),
        (Calls(0, [0, 1, 3], True, True), Calls(0, [0, 1, 3], False, True), False),
        (Calls(0, [0, 1], True), Calls(0, [0, 1], False, False, [2]), False),  # a root that is over with the step
        (Calls(0, [0, 1, 2], True, True), Calls(1, [0, 1], False, False, [2]), False),
        (Calls(0, [0], False, False, [3, 1]), Calls(0, [0], False, False, [3, 2]), True),
        (Calls(0, [0], False, False, [3, 1]), Calls(0, [0], False, False, [3]), False),
    ],
)
def test_a_slow_rank_contradicts_nobody(own: Calls, other: Calls, is_wrong: bool) -> None:
    assert own.contradicts(other) == other.contradicts(own) == is_wrong


def calls_before_forwards(make: Any, strategy: str, num_ranks: int, readers: int) -> list[Calls]:
    """What a step tells of its calls before each forward of a layer."""
    found: list[Calls] = []
    trainer = make_trainer(build_strategy(f"{strategy},check=off"), num_ranks)
    own = Block.forward

    def noted(self: Any, *args: Any) -> Any:  # with hooks, stages would take turns
        if torch.is_grad_enabled() and isinstance(trainer.strategy.steps, Steps):
            found.append(trainer.strategy.steps.order.calls)
        return own(self, *args)

    with mock.patch.object(Block, "forward", noted):
        trainer.fit(make(), batches(readers, steps=2))
    return found


def test_a_rank_that_waits_between_microbatches_is_not_done(ranks: Any) -> None:
    """However far it is behind others, which wait for it in a later layer or microbatch, none of them is wrong."""
    strategy = "fsdp_custom:pipeline=2,shard=2,microbatches=4"
    for found in ranks(4).run(calls_before_forwards, ByteGPT, strategy, 4, 2):
        assert len(found) >= 8
        assert not [(one, two) for one, two in itertools.combinations(found, 2) if one.contradicts(two)]


def fitted(make: Any, strategy: str, num_ranks: int, readers: int) -> tuple[Outcome, dict[str, float], list[str]]:
    """The outcome of a fit with a sanity check, what it and a test have logged, and what is said of the first step."""
    L.seed_everything(3, verbose=False)
    module, recorder = make(), Recorder()
    built = strategy if strategy == "auto" else build_strategy(f"{strategy}:check=first_step")
    trainer = make_trainer(built, num_ranks, callbacks=[recorder], num_sanity_val_steps=1)
    with said() as lines:
        trainer.fit(module, batches(readers), batches(readers))
    recorder.outcome.final = full_state_dict(trainer)
    logged = dict(trainer.callback_metrics)
    if "test_step" in vars(make):
        trainer.test(module, batches(readers), verbose=False)
        logged.update(trainer.callback_metrics)
    return recorder.outcome, {name: float(value) for name, value in logged.items()}, lines


@pytest.mark.parametrize(
    ("make", "strategy"),
    [
        (NothingToValidate, "pp_custom"),
        (NothingToValidate, "tp_custom"),
        (TiedByFunction, "pp_custom"),
        (PenalizedFeatures, "tp_custom"),
        (PenalizedFeatures, "fsdp_custom"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_equal_to_one_process_from_the_first_step_on(ranks: Any, make: Any, strategy: str) -> None:
    readers = 2 if strategy == "fsdp_custom" else 1
    expected, of_one, _ = once(fitted, make, "auto", 1, 1)
    assert is_moving(expected)
    outcome, logged, lines = ranks(2).run(fitted, make, strategy, 2, readers)[0]
    assert worst(outcome, expected) <= TOLERANCE
    assert logged == pytest.approx(of_one, rel=TOLERANCE)
    assert lines[-1].startswith("first step equals one process"), lines


def test_modules_of_hugging_face_know_that_they_are_sharded(ranks: Any) -> None:
    """Wav2Vec 2.0 drops layers at random, by default; all ranks call them then."""
    pytest.importorskip("transformers")
    for during, after in ranks(2).run(marks, "fsdp_custom", 2):
        assert during
        assert not after
    assert ranks(2).run(marks, "ddp_custom", 2) == [(False, False)] * 2


def marks(strategy: str, num_ranks: int) -> tuple[bool, bool]:
    """Whether Hugging Face takes its module for a sharded one, during a fit and after it."""
    from transformers.integrations.fsdp import is_fsdp_managed_module

    seen = []

    class Watching(Callback):
        def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
            seen.append(is_fsdp_managed_module(pl_module.model))

    module = HuggingFaceGPT2()
    trainer = make_trainer(build_strategy(f"{strategy}:check=off"), num_ranks, callbacks=[Watching()])
    trainer.fit(module, loader_of("hf_gpt2", steps=1, global_batch=GLOBAL_BATCH, num_ranks=num_ranks))
    return all(seen), is_fsdp_managed_module(module.model)

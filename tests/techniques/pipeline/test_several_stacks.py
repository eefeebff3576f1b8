"""Models with several stacks under a pipeline, against one process: encoders with decoders, pyramids, towers."""

from __future__ import annotations

import functools
import re
from typing import Any
from unittest import mock

import pytest
import torch
from lightning import seed_everything

from lightning_parallel import ConfigurationError, build_strategy, full_state_dict
from lightning_parallel.strategies import failures, pipelined_module
from tests.data import batches
from tests.models.pipelined import Deep
from tests.models.several_stacks import SEVERAL_STACKS, CalledTwice, SkippingLater, SkippingMore, Towers
from tests.parity import (
    TOLERANCE,
    Outcome,
    Recorder,
    assert_same_training,
    checked,
    is_moving,
    make_trainer,
    once,
    train_module,
    trainer_for,
    worst,
)
from tests.rank_pool import RankError

MODULES = {**SEVERAL_STACKS, "more": SkippingMore, "later": SkippingLater, "called_twice": CalledTwice}
FEW = 3


def trained(name: str, optimizer: str, strategy: str, num_ranks: int) -> Outcome:
    readers = 2 if strategy.startswith("fsdp_custom:pipeline=2,check") else 1
    make = functools.partial(MODULES[name], optimizer)
    return train_module(make, batches("byte_gpt", readers, FEW), strategy, num_ranks, norms=True)


def assert_parity(ranks: Any, name: str, optimizer: str, strategy: str, size: int = 2) -> None:
    expected = once(trained, name, optimizer, "auto", 1)
    assert is_moving(expected)
    assert_same_training(ranks(size).run(trained, name, optimizer, checked(strategy), size)[0], expected)


@pytest.mark.parametrize("name", SEVERAL_STACKS)
@pytest.mark.parametrize(
    ("optimizer", "options"), [("sgd", "schedule=gpipe,microbatches=4"), ("adamw", "microbatches=8")]
)
def test_stacks_one_after_the_other(ranks: Any, name: str, optimizer: str, options: str) -> None:
    assert_parity(ranks, name, optimizer, f"pp_custom:{options}")


@pytest.mark.parametrize(
    ("name", "stages"),
    [
        ("translator", [1, 4]),
        ("translator", [4, 1]),
        ("t5", [1, 3]),
        ("t5", [3, 1]),
        ("whisper", [3, 1]),
        ("cait", [3, 1]),
        ("skipping", [2, 4]),
        ("skipping", [5, 1]),
        ("towers", [1, 4]),
        ("towers", [4, 1]),
    ],
)
def test_a_cut_anywhere(ranks: Any, name: str, stages: list[int]) -> None:
    """What passes a stack by is sent along, whichever layer begins the stage that takes it."""
    assert_parity(ranks, name, "adamw", f"pp_custom:stages={stages},microbatches=4")


@pytest.mark.parametrize(
    ("name", "strategy", "size"),
    [
        ("translator", "pp_custom:schedule=interleaved,virtual_stages=2", 2),
        ("translator", "pp_custom:schedule=zbv", 2),
        ("skipping", "pp_custom:schedule=dualpipev,microbatches=4", 2),
        ("skipping", "pp_custom:schedule=interleaved,virtual_stages=3", 2),
        ("towers", "pp_custom:schedule=interleaved,virtual_stages=2,loss=batch", 2),
        ("translator", "pp_custom:stages=time,recompute=full", 2),
        ("skipping", "pp_custom:loss=batch,compile=layers", 2),
        ("skipping", "pp_custom", 4),
        ("translator", "fsdp_custom:pipeline=2", 4),
        ("skipping", "fsdp_custom:pipeline=2,tensor=2", 4),
        ("pyramid", "fsdp_custom:pipeline=2,context=2", 4),
        ("more", "pp_custom", 2),
    ],
)
def test_with_other_options(ranks: Any, name: str, strategy: str, size: int) -> None:
    assert_parity(ranks, name, "adamw", strategy, size)


def evaluated(name: str, strategy: str, num_ranks: int) -> float:
    seed_everything(3, verbose=False)
    trainer = make_trainer(strategy if strategy == "auto" else build_strategy(strategy), num_ranks)
    return float(trainer.validate(MODULES[name]("sgd"), batches("byte_gpt", 1, 1), verbose=False)[0]["val_loss"])


@pytest.mark.parametrize("name", ["translator", "towers"])
def test_an_evaluation_before_training(ranks: Any, name: str) -> None:
    found = ranks(2).run(evaluated, name, "pp_custom", 2)
    assert found == pytest.approx([evaluated(name, "auto", 1)] * 2, abs=1e-5)


def predicted(strategy: str, num_ranks: int) -> dict[str, torch.Tensor]:
    seed_everything(3, verbose=False)
    trainer = make_trainer(strategy if strategy == "auto" else build_strategy(strategy), num_ranks)
    (found,) = trainer.predict(Towers("sgd"), batches("byte_gpt", 1, 1))
    return found


class WithTeacher(Deep):
    """A copy of a whole module that training does not call, and validation may."""

    is_asked = False

    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__(optimizer)
        self.teacher = Deep(optimizer).requires_grad_(False)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.teacher.loss(*batch) if self.is_asked else self.loss(*batch)
        self.log("val_loss", loss, sync_dist=True)


class AsksTeacher(WithTeacher):
    """In validation, also before training."""

    is_asked = True


def beside_teacher(make: Any, strategy: str, num_ranks: int, readers: int) -> tuple[Outcome, float, str]:
    """The outcome, the loss of validation, and what was said of the schedule."""
    said: list[str] = []
    seed_everything(3, verbose=False)
    module, recorder = make(), Recorder()
    options: dict[str, Any] = {"callbacks": [recorder], "num_sanity_val_steps": 1, "max_epochs": 2}
    trainer = trainer_for(strategy, num_ranks, **options)
    with mock.patch.object(pipelined_module, "rank_zero_info", said.append):
        trainer.fit(module, batches("byte_gpt", readers, FEW), batches("byte_gpt", readers, FEW))
    recorder.outcome.final = full_state_dict(trainer)
    return recorder.outcome, float(trainer.callback_metrics["val_loss"]), " ".join(said)


@pytest.mark.parametrize("make", [WithTeacher, AsksTeacher])
@pytest.mark.parametrize(
    ("strategy", "size", "readers"),
    [("pp_custom", 2, 1), ("fsdp_custom:pipeline=2", 4, 2), ("tp_custom:tensor=2,pipeline=2", 4, 1)],
)
def test_a_stack_that_training_does_not_call(ranks: Any, make: Any, strategy: str, size: int, readers: int) -> None:
    """Nobody takes turns for it."""
    expected, value, _ = once(beside_teacher, make, "auto", 1, 1)
    found, own_value, said = ranks(size).run(beside_teacher, make, strategy, size, readers)[0]
    assert worst(found, expected) < TOLERANCE
    assert own_value == pytest.approx(value, abs=TOLERANCE)
    assert "take turns" not in said


@pytest.mark.parametrize("options", ["stages=[2,3]", "stages=[4,1],loss=microbatch"])
def test_what_a_step_returns_of_all_stages(ranks: Any, options: str) -> None:
    expected = predicted("auto", 1)
    for found in ranks(2).run(predicted, f"pp_custom:{options}", 2):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def refused(name: str, strategy: str) -> str:
    with mock.patch.object(failures, "GRACE", 1.0):
        try:
            trained(name, "adamw", strategy, 2)
        except ConfigurationError as error:
            return str(error)
    return ""


def told(name: str, strategy: str) -> str:
    """What a fit says of its schedule."""
    with mock.patch("lightning_parallel.strategies.pipelined_module.rank_zero_info") as info:
        trained(name, "adamw", strategy, 2)
    return "\n".join(call.args[0] for call in info.call_args_list)


def test_a_stack_that_is_called_twice_is_left_out_by_the_value_that_is_named(ranks: Any) -> None:
    said = ranks(2).run(told, "called_twice", "pp_custom")
    named = re.search(r"each layer of high once, .*take turns.* give (layers=\S+), which leaves high whole", said[0])
    assert named is not None, said
    assert said[0] == said[1]
    assert_parity(ranks, "called_twice", "adamw", f"pp_custom:{named[1]}")


def test_a_schedule_fits_stacks_in_the_order_of_their_calls(ranks: Any) -> None:
    """Not in that of registration, in which stages would take turns."""
    assert not any("take turns" in said for said in ranks(2).run(told, "towers", "pp_custom"))


@pytest.mark.parametrize(
    ("name", "strategy"),
    [("called_twice", "pp_custom"), ("towers", "pp_custom:schedule=turns"), ("t5", "pp_custom:schedule=turns")],
)
def test_stages_of_several_stacks_take_turns(ranks: Any, name: str, strategy: str) -> None:
    assert_parity(ranks, name, "adamw", strategy)


def test_what_the_first_step_has_not_shown_is_refused(ranks: Any) -> None:
    with pytest.raises(RankError, match=r"something that only another pipeline stage computes \(with tokens.weight\)"):
        ranks(2).run(refused, "later", "pp_custom")

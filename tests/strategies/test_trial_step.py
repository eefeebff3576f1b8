"""A module that does not fit beside itself is compared in a trial step with fewer layers, of which nothing remains."""

from __future__ import annotations

from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from lightning_parallel.module.layer_check import LayerCheck
from tests.data import batches
from tests.jobs.first_steps import ends_before_an_update, fit_with_room, little_memory
from tests.models.deep import Deep, DeepPenalty, DeepWithHabits, FlatAndDeep, OneLayerAtATime
from tests.names import num_ranks, num_readers
from tests.parity import TOLERANCE, once, train_module, worst

NAMES = [
    "zero2_custom",
    "fsdp_custom",
    "hsdp_custom",
    "cp_custom",
    "tp_custom",
    "fsdp_tp_custom",
    "tp_custom:sequence=true",
    "fsdp_custom:reshard=never,recompute=full",
    "fsdp_custom:compile=layers",
    "fsdp_custom:offload=all",
]


def run(ranks: Any, job: Any, strategy: str, *args: Any, **kwargs: Any) -> list[Any]:
    name = strategy.partition(":")[0]
    size = num_ranks(name)
    found: list[Any] = ranks(size).run(job, *args, "byte_gpt", strategy, size, num_readers(name, size), **kwargs)
    return found


def reference(make: Any, **kwargs: Any) -> Any:
    return once(train_module, make, batches("byte_gpt", 1), "auto", 1, **kwargs)


@pytest.mark.parametrize("strategy", NAMES)
def test_the_trial_equals_one_process_and_so_does_the_run(ranks: Any, strategy: str) -> None:
    outcome, lines = run(ranks, fit_with_room, strategy, 0.6, Deep)[0]
    assert len(lines) == 1
    assert lines[0].startswith("first step equals one process in a trial with 3 of 6 layers: loss ")
    assert worst(outcome, reference(Deep)) <= TOLERANCE


@pytest.mark.parametrize("strategy", ["fsdp_custom:accumulation_sync=last", "fsdp_custom", "tp_custom"])
def test_within_an_accumulation_window(ranks: Any, strategy: str) -> None:
    outcome, lines = run(ranks, fit_with_room, strategy, 0.6, Deep, accumulate_grad_batches=2)[0]
    assert lines[0].startswith("first step equals one process in a trial with 3 of 6 layers: loss ")
    assert worst(outcome, reference(Deep, accumulate_grad_batches=2)) <= TOLERANCE


def test_layers_between_others_in_one_container(ranks: Any) -> None:
    outcome, lines = run(ranks, fit_with_room, "fsdp_custom:layers=model.1:-2", 0.6, FlatAndDeep)[0]
    assert "in a trial with 3 of 6 layers" in lines[0]
    assert worst(outcome, reference(FlatAndDeep)) <= TOLERANCE


@pytest.mark.parametrize(
    ("strategy", "room"), [("fsdp_custom", 0.1), ("ddp_custom", 0.6), ("zero1_custom", 0.6), ("pp_custom", 0.6)]
)
def test_what_is_not_compared_is_told(ranks: Any, strategy: str, room: float) -> None:
    outcome, lines = run(ranks, fit_with_room, strategy, room, Deep)[0]
    assert len(lines) == 1
    assert lines[0].startswith("first step not compared with one process: the module does not fit on a rank beside")
    assert worst(outcome, reference(Deep)) <= TOLERANCE


def test_a_step_that_needs_all_layers_is_not_compared(ranks: Any) -> None:
    outcome, lines = run(ranks, fit_with_room, "fsdp_custom", 0.6, OneLayerAtATime)[0]
    assert len(lines) == 1
    assert lines[0].startswith(
        "first step not compared with one process: a plain copy of the module with 3 of 6 layers"
    )
    assert worst(outcome, reference(OneLayerAtATime)) <= TOLERANCE


class Kept(Callback):
    """What is logged in each step, and what a module with habits holds at the end."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.found.append({name: float(value) for name, value in trainer.logged_metrics.items()})

    def on_train_end(self, trainer: L.Trainer, module: Any) -> None:
        self.found.append({name: float(value) for name, value in trainer.callback_metrics.items()})
        self.found += [module.num_steps, module.losses, module.drawn, module.factor, float(module.running)]


def all_that_remains(room: float, strategy: str, readers: int, check: str) -> tuple[Any, Any]:
    kept = Kept()
    with little_memory(room, DeepWithHabits):
        outcome = train_module(
            DeepWithHabits, batches("byte_gpt", readers), f"{strategy}:check={check}", 2, watching=[kept]
        )
    return outcome, kept.found


@pytest.mark.parametrize(("strategy", "readers"), [("fsdp_custom", 2), ("hsdp_custom", 2)])
def test_nothing_remains_of_it(ranks: Any, strategy: str, readers: int) -> None:
    """In no bit: random numbers, buffers, metrics, what is logged and collected."""
    tried = ranks(2).run(all_that_remains, 0.6, strategy, readers, "auto")
    without = ranks(2).run(all_that_remains, 0.6, strategy, readers, "off")
    for (outcome, found), (other, expected) in zip(tried, without, strict=True):
        assert found == expected
        assert found[-5] == len(outcome.losses)
        assert outcome.losses == other.losses
        assert all(torch.equal(outcome.final[name], other.final[name]) for name in other.final)


def without_reducing(strategy: str) -> str:
    with little_memory(0.6, Deep), mock.patch("lightning_parallel.steps.reduce_gradients", return_value=None):
        return ends_before_an_update(Deep, strategy, "auto")


def test_gradients_that_nobody_reduces_end_the_fit(ranks: Any) -> None:
    found = ranks(2).run(without_reducing, "fsdp_custom:layers=model.blocks")
    assert "gradients differ" in found[0]


def without_the_layer_check(strategy: str) -> str:
    run_split = LayerCheck.run_split

    def finds_nothing(self: LayerCheck, *args: Any, **kwargs: Any) -> list[str]:
        run_split(self, *args, **kwargs)
        return []

    with little_memory(0.6, DeepPenalty), mock.patch.object(LayerCheck, "run_split", finds_nothing):
        return ends_before_an_update(DeepPenalty, strategy, "auto")


def test_a_loss_that_is_another_one_ends_the_fit(ranks: Any) -> None:
    found = ranks(2).run(without_the_layer_check, "cp_custom")
    assert "in place of" in found[0]
    assert found[1] == "the first step differs from one process; rank 0 says how"

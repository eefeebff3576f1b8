"""The order in which stages run: schedules differ in nothing else, so equal numbers say nothing about them."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import nn

from lightning_parallel.techniques.pipeline.execution import training_actions
from lightning_parallel.techniques.pipeline.schedules import PipelinePolicy
from lightning_parallel.techniques.pipeline.stage_plan import StagePlan
from tests.data import batches
from tests.models.cases import Block
from tests.models.pipelined import Deep
from tests.parity import trainer_for

ORDERS = {
    ("gpipe", 0): "F0 F1 F2 F3 B0 B1 B2 B3",
    ("gpipe", 1): "F0 F1 F2 F3 B0 B1 B2 B3",
    ("1f1b", 0): "F0 F1 B0 F2 B1 F3 B2 B3",
    ("1f1b", 1): "F0 B0 F1 B1 F2 B2 F3 B3",
}
"""Schedule and rank of two -> what it computes for four microbatches."""


@pytest.mark.parametrize(("schedule", "rank"), ORDERS)
def test_orders(schedule: str, rank: int) -> None:
    actions = training_actions(PipelinePolicy(schedule=schedule), StagePlan(2, (2, 4)), 4, rank)
    computed = [f"{action.kind}{action.microbatch}" for action in actions if action.kind in ("F", "B")]
    assert " ".join(computed) == ORDERS[schedule, rank]


def test_an_interleaved_rank_goes_through_its_stages_in_turn() -> None:
    policy = PipelinePolicy(schedule="interleaved", virtual_stages=2)
    actions = training_actions(policy, StagePlan(2, (1, 2, 3, 4)), 4, 0)
    forwards = [(action.stage, action.microbatch) for action in actions if action.kind == "F"]
    assert forwards[:4] == [(0, 0), (0, 1), (2, 0), (2, 1)]
    first_backward = next(index for index, action in enumerate(actions) if action.kind == "B")
    assert sum(action.kind == "F" for action in actions[:first_backward]) < len(forwards)


def observed(strategy: str) -> str:
    """In which order this rank ran the forwards of its layers and its backwards, in the second step."""
    order: list[str] = []
    backward = torch.autograd.backward

    def noted(*args: Any, **kwargs: Any) -> None:
        order.append("B")
        backward(*args, **kwargs)

    def note(module: nn.Module, args: Any) -> None:
        if isinstance(module, Block) and order[-1:] != ["F"]:
            order.append("F")

    class Look(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            order.clear()

        def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
            found[:] = order  # Lightning's own backward comes after the schedule's

    found: list[str] = []
    handle = nn.modules.module.register_module_forward_pre_hook(note)
    try:
        with mock.patch("torch.autograd.backward", noted):
            trainer_for(strategy, dist.get_world_size(), callbacks=[Look()]).fit(Deep(), batches("byte_gpt", 1, 2))
    finally:
        handle.remove()
    return "".join(found)


@pytest.mark.parametrize(("schedule", "orders"), [("gpipe", ["FBBBB", "FBBBB"]), ("1f1b", ["FBFBFBB", "FBFBFBFB"])])
def test_a_fit_runs_in_the_order_of_its_schedule(ranks: Any, schedule: str, orders: list[str]) -> None:
    """Forwards that follow each other are one letter."""
    assert ranks(2).run(observed, f"pp_custom:schedule={schedule},microbatches=4") == orders
    if schedule == "1f1b":  # the default
        assert ranks(2).run(observed, "pp_custom:microbatches=4") == orders

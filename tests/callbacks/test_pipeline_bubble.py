"""The share of a step in which a stage idles, against a count by hand from the order of the schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_parallel.callbacks import StepBreakdown, metered_steps
from lightning_parallel.techniques.pipeline import execution
from lightning_parallel.techniques.pipeline.execution import Action, training_actions
from lightning_parallel.techniques.pipeline.schedules import PipelinePolicy
from lightning_parallel.techniques.pipeline.stage_plan import StagePlan
from tests.jobs.meters import Long, Ticks, heard, spend
from tests.parity import trainer_for

FORWARD, BACKWARD = 2.0, 4.0
"""Seconds of a layer, by a clock that goes on by hand, so that other programs on the machine take nothing from them."""
SECONDS = {"F": FORWARD, "B": BACKWARD}
MICROBATCHES, UPDATES = 4, 3
STEPS = 1 + 2 * UPDATES
"""The first one is left out, and in the second one the module is looked at; the last three are those of the test."""


class Sleepy(nn.Module):
    """A layer that takes its time."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, values: Tensor) -> Tensor:
        spend(FORWARD)
        out: Tensor = Long.apply(self.linear(values), BACKWARD)
        return out


@dataclass
class Arriving:
    """A transfer with the time at which it was sent; waiting for it goes on to that time, if it is not yet over."""

    works: list[Any]
    sent: Tensor | None = None
    kept: Tensor | None = None

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self.works)

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        if self.sent is not None:
            spend(max(0.0, self.sent.item() - Ticks.now))


class JointTime:
    """Transfers in which each message tells by the sender's clock when it was sent; they take no time themselves.

    The time comes with the message, in the same order, so that nothing depends on which rank is faster on this machine.
    """

    @staticmethod
    def isend(tensor: Tensor, **kwargs: Any) -> Arriving:
        sent = torch.tensor([Ticks.now], dtype=torch.float64)
        return Arriving([dist.isend(sent, **kwargs), dist.isend(tensor, **kwargs)], kept=sent)

    @staticmethod
    def irecv(tensor: Tensor, **kwargs: Any) -> Arriving:
        sent = torch.zeros(1, dtype=torch.float64)
        return Arriving([dist.irecv(sent, **kwargs), dist.irecv(tensor, **kwargs)], sent)

    @classmethod
    def recv(cls, tensor: Tensor, **kwargs: Any) -> None:
        cls.irecv(tensor, **kwargs).wait()


class Stack(L.LightningModule):
    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Sleepy() for _ in range(num_layers)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.layers(batch).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def measured(schedule: str, num_layers: int) -> tuple[float, float, list[str]]:
    """The share of waiting in all of the schedule, seconds of an update, and the summary."""
    L.seed_everything(3, verbose=False)
    stages = 1 if num_layers == 2 else 2
    strategy = f"pp_custom:schedule={schedule},virtual_stages={stages},microbatches={MICROBATCHES}"
    meter = StepBreakdown(every=UPDATES)
    clock = mock.patch.object(metered_steps, "build_clock", return_value=Ticks())
    with heard() as said, clock, mock.patch.object(execution, "dist", JointTime):
        trainer = trainer_for(strategy, 2, callbacks=[meter], max_steps=STEPS, max_epochs=-1)
        trainer.fit(Stack(num_layers), DataLoader(torch.randn(STEPS * MICROBATCHES, 4), batch_size=MICROBATCHES))
    latest = meter.latest
    waiting, working = latest["breakdown/bubble"], latest["breakdown/forward_backward"]
    return waiting / (waiting + working), latest["breakdown/step_seconds"], [each for each in said if "bubble" in each]


def counted(schedule: str, num_layers: int, *, announces: bool = True) -> tuple[float, float]:
    """The same by hand: each rank takes its actions in order, and each as soon as what it needs is there.

    A stage's first receive waits until the sender has computed, as it asks for shapes (`announces`); no other one does.
    """
    policy = PipelinePolicy(schedule=schedule, virtual_stages=num_layers // 2)
    plan = StagePlan(2, tuple(range(1, num_layers + 1)))
    orders = [list(training_actions(policy, plan, MICROBATCHES, rank)) for rank in range(2)]
    done: dict[Any, float] = {}
    ends = [0.0, 0.0]
    while any(orders):
        for rank, order in enumerate(orders):
            needs = _needs(order[0], plan.last, announces=announces) if order else [None]
            if all(each in done for each in needs):
                action = order.pop(0)
                ends[rank] = max([ends[rank], *(done[each] for each in needs)]) + SECONDS.get(action.kind, 0.0)
                done[action.kind, action.stage, action.microbatch] = ends[rank]
    work = MICROBATCHES * num_layers * (FORWARD + BACKWARD)
    return 1 - work / (2 * max(ends)), max(ends)


def _needs(action: Action, last: int, *, announces: bool) -> list[Any]:
    """What has to be computed before `action` can begin."""
    stage, part = action.stage, action.microbatch
    if action.kind == "F":
        return [("F", stage - 1, part)] if stage else []
    if action.kind == "B":
        return [("F", stage, part), *([("B", stage + 1, part)] if stage < last else [])]
    return [("F", stage - 1, 0)] if action.kind == "RECV_F" and announces else []


@pytest.mark.parametrize(
    ("schedule", "num_layers", "ideal"), [("gpipe", 2, 1 / 5), ("1f1b", 2, 1 / 5), ("interleaved", 4, 1 / 9)]
)
def test_the_count_by_hand(schedule: str, num_layers: int, ideal: float) -> None:
    """(P - 1) / (V M + P - 1), as Huang et al. 2019 and Narayanan et al. 2021 have it."""
    assert counted(schedule, num_layers, announces=False)[0] == pytest.approx(ideal)
    # With several stages a rank, rank 0 posts the receive for its second one before its second forward, and waits for
    # the shapes until rank 1 has computed the first: one forward more. 8 (F + B) = 48 of 54 seconds are 48 of 56.
    share, seconds = counted(schedule, num_layers)
    assert share == pytest.approx(1 / 7 if schedule == "interleaved" else ideal)
    assert seconds == (56 if schedule == "interleaved" else 30)


@pytest.mark.parametrize(("schedule", "num_layers"), [("gpipe", 2), ("1f1b", 2), ("interleaved", 4)])
def test_idle_time_of_stages(ranks: Any, schedule: str, num_layers: int) -> None:
    share, seconds = counted(schedule, num_layers)
    results = ranks(2).run(measured, schedule, num_layers)
    for found, update, _ in results:
        assert found == pytest.approx(share)
        assert update == pytest.approx(seconds)
    (summary,), silent = (said for *_, said in results)
    assert silent == []
    assert "bubble " in summary

"""``stages="time"``: stages are moved to where layers take equally long, and nothing of the measuring is left."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_parallel import ConfigurationError, build_strategy, full_state_dict
from lightning_parallel.techniques.pipeline.stage_plan import StepCosts, balanced
from lightning_parallel.techniques.pipeline.timing import is_worth_moving
from tests.data import STEPS, batches
from tests.models.cases import ByteGPT
from tests.parity import TOLERANCE, Outcome, Recorder, make_trainer, worst

MICROBATCHES = 4


class Slow(nn.Module):
    """A layer that takes so many milliseconds more, and counts its calls in training.

    In a list, where a pipeline does not look: of a number or a buffer it would notice that microbatches are counted.
    """

    def __init__(self, layer: nn.Module, milliseconds: int) -> None:
        super().__init__()
        self.layer = layer
        self.milliseconds = milliseconds
        self.calls = [torch.zeros(())]

    def forward(self, hidden: Tensor) -> Tensor:
        time.sleep(1e-3 * self.milliseconds)
        if torch.is_grad_enabled() or self.training:
            self.calls[0] += 1
        return self.layer(hidden)


class Uneven(ByteGPT):
    """Four layers of equal size. The step has a metric, and logs."""

    times: tuple[int, ...] = (10, 10, 10, 30)

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        blocks = [*self.model.blocks, type(self)._another()]
        self.model.blocks = nn.ModuleList(Slow(b, t) for b, t in zip(blocks, self.times, strict=True))
        self.mean = MeanMetric()
        self.steps = 0

    @staticmethod
    def _another() -> nn.Module:
        return ByteGPT().model.blocks[0]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.steps += 1
        self.mean.update(loss)
        self.log("logged", loss)
        return loss


class Even(Uneven):
    times = (10, 10, 10, 10)


class SlowHead(Uneven):
    """What is behind the last layer counts as well."""

    times = (10, 10, 10, 10)

    def loss(self, tokens: Tensor) -> Tensor:
        loss = super().loss(tokens)
        time.sleep(20e-3)
        return loss


UNEVEN = {"uneven": Uneven, "even": Even, "slow_head": SlowHead}


class Stages(Callback):
    """The numbers of layers of the stages at the end, and how often the module was cut."""

    def __init__(self) -> None:
        self.counts: tuple[int, ...] = ()

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        parallel = getattr(trainer.strategy, "_parallel", None)
        if parallel is not None:
            self.counts = parallel.current.cut.plan.stages.counts


def train(case: str, strategy: str, num_ranks: int, num_readers: int = 1) -> tuple[Outcome, dict[str, Any]]:
    L.seed_everything(3, verbose=False)
    recorder, stages = Recorder(), Stages()
    module = UNEVEN[case]()
    built = strategy if strategy == "auto" else build_strategy(strategy)
    trainer = make_trainer(built, num_ranks, callbacks=[recorder, stages], gradient_clip_val=0.5)
    trainer.fit(module, batches("byte_gpt", num_readers))
    recorder.outcome.final = full_state_dict(trainer)
    calls = [int(layer.calls[0]) for layer in module.model.blocks]  # type: ignore[index, arg-type]
    found = {"counts": stages.counts, "calls": calls, "mean": float(module.mean.compute())}
    return recorder.outcome, found


@pytest.mark.parametrize(
    ("case", "strategy", "counts"),
    [
        ("uneven", f"pp_custom:microbatches={MICROBATCHES},stages=auto", (2, 2)),
        ("uneven", f"pp_custom:microbatches={MICROBATCHES},stages=time", (3, 1)),
        ("slow_head", f"pp_custom:microbatches={MICROBATCHES},stages=time", (3, 1)),
        ("even", f"pp_custom:microbatches={MICROBATCHES},stages=time", (2, 2)),
        ("uneven", f"fsdp_custom:pipeline=2,microbatches={MICROBATCHES},stages=time,recompute=full", (3, 1)),
    ],
)
def test_stages_take_equally_long(ranks: Any, case: str, strategy: str, counts: tuple[int, ...]) -> None:
    """And the measuring neither changes what is trained nor leaves anything: buffers, metrics, random numbers."""
    expected, reference = train(case, "auto", 1)
    size = 4 if strategy.startswith("fsdp") else 2
    results = ranks(size).run(train, case, strategy, size, size // 2)
    assert worst(results[0][0], expected) < TOLERANCE
    for _, found in results:
        assert found["counts"] == counts
        assert found["mean"] == pytest.approx(reference["mean"], abs=TOLERANCE)
    if "recompute" not in strategy:  # which calls a layer once more
        calls = torch.tensor([found["calls"] for _, found in results])
        assert calls.amax(0).tolist() == [STEPS * MICROBATCHES] * 4


def refusal() -> str:
    with mock.patch("lightning_parallel.strategies.parallel_module.ParallelModule.is_too_large", True):
        try:
            train("uneven", "pp_custom:stages=time", 2)
        except ConfigurationError as error:
            return str(error)
    return ""


def test_a_module_that_no_rank_can_hold_is_told_its_stages(ranks: Any) -> None:
    message = ranks(2).run(refusal)[0]
    assert "stages='time' needs the whole module on a rank once, and Uneven is too large" in message
    assert "stages=[3, 1]" in message


def test_costs() -> None:
    costs = StepCosts((10, 10, 10, 30), first=5, last=1)
    assert [costs.largest(counts) for counts in ((2, 2), (3, 1), (1, 3))] == [41, 35, 51]
    assert balanced(costs, 2) == (3, 1)
    assert is_worth_moving(costs, (2, 2), (3, 1))
    assert not is_worth_moving(StepCosts((100, 98), 0, 0), (1, 1), (1, 1))

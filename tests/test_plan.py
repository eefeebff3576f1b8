"""The plan of a module: made once, cheap, comparable, and what `explain` says is what a fit then does."""

from __future__ import annotations

import json
import math
import re
import time
from collections import Counter
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_parallel import Degrees, build_strategy, explain
from lightning_parallel.module import layer_stacks
from lightning_parallel.module.placeholders import is_placeholder
from lightning_parallel.plan import Plan, build_plan
from lightning_parallel.policies import LayerPolicies, Policies
from lightning_parallel.strategies import planned_strategy
from lightning_parallel.techniques.pipeline.schedules import PipelinePolicy
from tests.collectives import Collectives
from tests.data import loader_of
from tests.models.cases import CASES, Block
from tests.parity import make_trainer

NAMES = {
    2: ("ddp_custom", "zero1_custom", "fsdp_custom", "hsdp_custom", "cp_custom", "tp_custom", "pp_custom"),
    4: ("fsdp_tp_custom", "fsdp_custom:pipeline=2", "fsdp_custom:pipeline=2,tensor=2"),
}


def plan_of(module: nn.Module, **degrees: int) -> Plan:
    product = 1
    for degree in degrees.values():
        product *= degree
    return build_plan(module, Degrees(**degrees).resolve(product), Policies())  # type: ignore[arg-type]


# Made once -----------------------------------------------------------------------------------------------------------


def counts_of_a_fit(strategy: str, num_ranks: int, **settings: Any) -> dict[str, int]:
    """How often a fit makes a plan and searches layers."""
    counts: Counter[str] = Counter()

    def counted(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return function(*args, **kwargs)

        return call

    L.seed_everything(1, verbose=False)
    with (
        mock.patch.object(planned_strategy, "build_plan", counted("plans", planned_strategy.build_plan)),
        mock.patch.object(layer_stacks, "search", counted("searches", layer_stacks.search)),
    ):
        trainer = make_trainer(build_strategy(strategy), num_ranks, **settings)
        trainer.fit(CASES["byte_gpt"](), loader_of("byte_gpt", steps=2, global_batch=4, num_ranks=1))
    return dict(counts)


@pytest.mark.parametrize(("size", "strategy"), [(size, name) for size, names in NAMES.items() for name in names])
def test_a_fit_makes_one_plan_and_searches_layers_once(ranks: Any, size: int, strategy: str) -> None:
    for counts in ranks(size).run(counts_of_a_fit, strategy, size):
        assert counts["plans"] == 1
        # The search calls itself for each container on its way down, and begins once at the module.
        assert counts["searches"] == searches_of_one_plan()


def test_a_precision_that_converts_the_module_makes_no_second_plan(ranks: Any) -> None:
    for counts in ranks(2).run(counts_of_a_fit, "fsdp_custom", 2, precision="bf16-true"):
        assert counts["plans"] == 1


def searches_of_one_plan() -> int:
    counts: Counter[str] = Counter()
    search = layer_stacks.search

    def counted(*args: Any) -> Any:
        counts["searches"] += 1
        return search(*args)

    with mock.patch.object(layer_stacks, "search", counted):
        plan_of(CASES["byte_gpt"](), shard=2)
    return counts["searches"]


# Cheap, comparable, printable ----------------------------------------------------------------------------------------


class Deep(nn.Module):
    """80 layers of the width of a 70 B model."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32000, 8192)
        self.layers = nn.ModuleList(Block(8192, 64) for _ in range(80))
        self.head = nn.Linear(8192, 32000, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def test_a_plan_of_80_layers_takes_less_than_a_second() -> None:
    with torch.device("meta"):
        module = Deep()
    plan_of(module, tensor=2)  # imports
    times = []
    for _ in range(3):
        begin = time.process_time()
        plan = plan_of(module, shard=8, tensor=8, pipeline=8)
        times.append(time.process_time() - begin)
    assert plan.violations == ()
    assert len(plan.sharding) == 8
    assert min(times) < 1.0, times


def test_plans_can_be_compared() -> None:
    module = CASES["byte_gpt"]()
    assert plan_of(module, shard=2) == plan_of(module, shard=2)
    assert plan_of(module, tensor=2) != plan_of(module, shard=2)
    before, after = plan_of(module, shard=2), Policies(layer=LayerPolicies(recompute="full"))
    assert before.changes(before.degrees, before.policies) == []
    (change,) = before.changes(before.degrees, after)
    assert change.startswith("layer: ")


@pytest.mark.parametrize("degrees", [{"shard": 2}, {"tensor": 2}, {"pipeline": 2}, {"shard": 2, "tensor": 2}])
def test_a_plan_prints_as_json(degrees: dict[str, int]) -> None:
    found = json.loads(plan_of(CASES["byte_gpt"](), **degrees).to_json())
    assert found["module"] == "ByteGPT"
    assert {name: size for name, size in found["degrees"].items() if size != 1} == degrees
    assert len(found["sharding"]) == degrees.get("pipeline", 1)


def test_a_plan_holds_every_violation() -> None:
    policies = Policies(pipeline=PipelinePolicy(stages=(1, 7)), tensor_plan={"nowhere": "colwise"})
    plan = build_plan(CASES["byte_gpt"](), Degrees(tensor=2, pipeline=2).resolve(4), policies)
    assert len(plan.violations) == 2
    assert plan.sharding == ()


# What is said is what is done ----------------------------------------------------------------------------------------


class Done(Callback):
    """What a fit has done to a module by the time that it trains, and what a step of it sends."""

    def __init__(self) -> None:
        self.units: list[str] = []
        self.whole: list[str] = []
        self.shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        self.numel = 0
        self.sends = Collectives()

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.units = [path for path, child in module.named_modules() if isinstance(child, FSDPModule)]
        self.numel = sum(p.numel() for p in module.parameters() if not is_placeholder(p))
        for name, parameter in module.named_parameters():
            if isinstance(parameter, DTensor):
                self.shapes[name] = tuple(parameter.shape), tuple(parameter.to_local().shape)
            elif not is_placeholder(parameter):
                self.whole.append(name)

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:  # in the first step layers are compared with themselves
            self.sends.__enter__()

    def on_before_optimizer_step(self, trainer: L.Trainer, module: L.LightningModule, optimizer: Any) -> None:
        if trainer.global_step == 1:
            self.sends.__exit__(None, None, None)


def said_and_done(case: str, strategy: str, num_ranks: int) -> tuple[list[str], Done]:
    L.seed_everything(1, verbose=False)
    done, module = Done(), CASES[case]()
    trainer = make_trainer(build_strategy(strategy), num_ranks, callbacks=[done])
    text = explain(trainer, module)
    trainer.fit(module, loader_of(case, steps=2, global_batch=4, num_ranks=1))
    done.sends = done.sends.counts  # type: ignore[assignment]
    return [line.strip() for line in text.splitlines()], done


def number(pattern: str, lines: list[str]) -> int:
    (found,) = [match[1] for line in lines if (match := re.search(pattern, line))]
    return int(found.replace(",", ""))


@pytest.mark.parametrize("strategy", ["fsdp_custom", "hsdp_custom:replicate=1", "fsdp_custom:layers=[]"])
def test_units_are_those_that_were_announced(ranks: Any, strategy: str) -> None:
    for lines, done in ranks(2).run(said_and_done, "byte_gpt", strategy, 2):
        assert number(r"^sharded over 2 ranks in (\d+) units", lines) == len(done.units)
        assert done.units[0] == ""
        assert ("model.blocks.*" in "".join(lines)) == ("model.blocks.0" in done.units)
        assert done.whole == []


@pytest.mark.parametrize(
    ("strategy", "size", "where"), [("fsdp_custom", 2, "2 ranks"), ("hsdp_custom", 4, "2 ranks, in 2 copies,")]
)
def test_shares_are_those_that_were_announced(ranks: Any, strategy: str, size: int, where: str) -> None:
    """Each tensor is cut along its first dimension, so some ranks have a row more than others."""
    results = ranks(size).run(said_and_done, "byte_gpt", strategy, size)
    kept = [4 / 1024 * sum(math.prod(local) for _, local in done.shapes.values()) for _, done in results]
    lines = results[0][0]
    assert number(rf"^sharded over {where} in (\d+) units", lines) == len(results[0][1].units)
    (announced,) = [
        float(match[1]) for line in lines if (match := re.match(r"a rank keeps ([\d.]+) KiB of 43.6", line))
    ]
    assert sum(kept) / size == pytest.approx(announced, abs=0.1)


def test_whole_parameters_are_those_that_were_announced(ranks: Any) -> None:
    for lines, done in ranks(2).run(said_and_done, "bare_parameter", "fsdp_custom", 2):
        announced = sorted(line.split()[1] for line in lines if line.startswith("whole: "))
        assert announced == sorted(done.whole) != []


def test_placements_and_collectives_are_those_that_were_announced(ranks: Any) -> None:
    for lines, done in ranks(2).run(said_and_done, "byte_gpt", "tp_custom", 2):
        announced = 0
        for line in lines:
            if match := re.match(r"model\.blocks\.\*\.(\S+): (\w+), \[(.*?)\] -> \[(.*?)\]", line):
                shapes = tuple(tuple(map(int, match[group].split(", "))) for group in (3, 4))
                for layer in range(3):
                    assert done.shapes[f"model.blocks.{layer}.{match[1]}.weight"] == shapes
                announced += 1
        assert announced >= 3
        (sent,) = [line for line in lines if line.startswith("model.blocks.*: forward")]
        forward, backward = (int(n) for n in re.findall(r"(\d+) all-reduces", sent))
        sums = sum(count for (kind, _), count in done.sends.items() if kind == "all_reduce")
        assert sums == 3 * (forward + backward)


def test_stages_are_those_that_were_announced(ranks: Any) -> None:
    results = ranks(2).run(said_and_done, "byte_gpt", "pp_custom", 2)
    lines = results[0][0]
    for stage, (_, done) in enumerate(results):
        assert number(rf"^stage {stage} on rank {stage} of the pipeline: .*, ([\d,]+) parameters", lines) == done.numel


def test_exchanges_of_sequences_are_those_that_were_announced(ranks: Any) -> None:
    for lines, done in ranks(2).run(said_and_done, "byte_gpt", "cp_custom", 2):
        assert any("an attention is four all-to-alls forward, four backward" in line for line in lines)
        exchanges = sum(count for (kind, _), count in done.sends.items() if "alltoall" in kind or "all_to_all" in kind)
        assert exchanges == 3 * 8

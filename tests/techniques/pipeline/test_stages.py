"""Pipeline parallel: each rank some of the layers, and numbers equal to those of one process."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins import MixedPrecision
from torch.utils.data import DataLoader

from lightning_parallel import build_strategy, full_state_dict
from tests.data import GLOBAL_BATCH, data_of
from tests.models.pipelined import Deep
from tests.models.tables import PIPELINE_MODULES
from tests.parity import TOLERANCE, Outcome, Recorder, make_trainer, reference, train, unchecked_strategy, worst


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("case", PIPELINE_MODULES)
def test_layers_over_two_ranks(ranks: Any, case: str, optimizer: str) -> None:
    ours = ranks(2).run(train, case, optimizer, "pp_custom", 2, 1)[0]
    difference = worst(ours, reference(case, optimizer))
    print(f"{case} {optimizer}: {difference:.1e}")
    assert difference < TOLERANCE


SCHEDULED = [
    "fsdp_custom:pipeline=2,schedule=interleaved,virtual_stages=2",
    "fsdp_custom:pipeline=2,schedule=zbv",
    "fsdp_custom:pipeline=2,stages=[1,3],recompute=full,schedule=gpipe",
]


@pytest.mark.parametrize("schedule", ["interleaved,virtual_stages=2", "zbv", "dualpipev,microbatches=4"])
@pytest.mark.parametrize("cut", ["context=2", "context=2,context_attention=ring", "tensor=2,sequence=true"])
def test_sequences_are_cut_in_each_stage_of_a_rank(ranks: Any, cut: str, schedule: str) -> None:
    """Between two stages of a rank, others compute: what is cut in the first is joined at its end."""
    strategy = f"fsdp_custom:pipeline=2,{cut},schedule={schedule}"
    assert worst(ranks(4).run(train, "deep", "adamw", strategy, 4, 1)[0], reference("deep", "adamw")) < TOLERANCE


def on_two_machines(case: str) -> tuple[list[int], Outcome]:
    """The ranks of this stack, where the first two ranks are one machine and the others another."""
    rank = dist.get_rank()
    strategies: list[Any] = []
    build = unchecked_strategy

    def keep(text: str) -> Any:
        strategies.append(build(text))
        return strategies[-1]

    places = {"NODE_RANK": str(rank // 2), "LOCAL_RANK": str(rank % 2)}
    with mock.patch.dict(os.environ, places), mock.patch("tests.parity.unchecked_strategy", keep):
        outcome = train(case, "adamw", "pp_custom", 2, 2, num_nodes=2)
    return dist.get_process_group_ranks(strategies[0].mesh.pipeline_group), outcome


def test_stages_of_a_stack_are_on_one_machine(ranks: Any) -> None:
    found = ranks(4).run(on_two_machines, "deep_tied")
    assert [stack for stack, _ in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert worst(found[0][1], reference("deep_tied")) < TOLERANCE


@pytest.mark.parametrize(
    ("case", "strategy", "readers"),
    [
        ("deep_tied", "pp_custom", 1),
        ("deep_tied", "fsdp_custom:pipeline=2", 2),
        ("deep_tied", "zero2_custom:pipeline=2", 2),
        ("deep_tied", "fsdp_custom:pipeline=2,replicate=2", 2),
        ("head_first", "pp_custom", 1),
        ("bare_parameter", "fsdp_custom:pipeline=2,replicate=2", 2),
        ("bert", "fsdp_custom:pipeline=2", 2),
        ("varying_length", "fsdp_custom:pipeline=2", 2),
        *((case, strategy, 2) for case in ("deep_tied", "head_first") for strategy in SCHEDULED),
    ],
)
def test_products(ranks: Any, case: str, strategy: str, readers: int) -> None:
    difference = worst(ranks(4).run(train, case, "adamw", strategy, 4, readers)[0], reference(case))
    print(f"{case} {strategy}: {difference:.1e}")
    assert difference < TOLERANCE


@pytest.mark.parametrize(
    "options",
    [
        "schedule=gpipe",
        "schedule=gpipe,microbatches=2",
        "schedule=1f1b,microbatches=8",
        "schedule=interleaved,virtual_stages=2",
        "schedule=zbv",
        "schedule=dualpipev",
        "stages=[3,1]",
        "recompute=selective",
        "reshard=never",
    ],
)
def test_schedules(ranks: Any, options: str) -> None:
    difference = worst(
        ranks(2).run(train, "deep_tied", "adamw", f"pp_custom:{options}", 2, 1)[0], reference("deep_tied")
    )
    print(f"{options}: {difference:.1e}")
    assert difference < TOLERANCE


@pytest.mark.parametrize("schedule", ["interleaved,virtual_stages=2", "zbv"])
def test_two_stages_on_a_rank_write_buffers_once(ranks: Any, schedule: str) -> None:
    ours = ranks(2).run(train, "returns_tuples", "adamw", f"pp_custom:schedule={schedule}", 2, 1)[0]
    assert worst(ours, reference("returns_tuples")) < TOLERANCE


def ragged(strategy: str, num_ranks: int) -> Outcome:
    """Batches of 8, 8 and 5 samples; the last one cannot be cut."""
    L.seed_everything(3, verbose=False)
    recorder = Recorder()
    built = strategy if strategy == "auto" else build_strategy(strategy)
    trainer = make_trainer(built, num_ranks, callbacks=[recorder])
    trainer.fit(Deep(), DataLoader(data_of("byte_gpt", 21, GLOBAL_BATCH), batch_size=GLOBAL_BATCH))
    recorder.outcome.final = full_state_dict(trainer)
    return recorder.outcome


@pytest.mark.parametrize("options", ["microbatches=4", "schedule=interleaved,virtual_stages=2"])
def test_a_smaller_last_batch(ranks: Any, options: str) -> None:
    assert worst(ranks(2).run(ragged, f"pp_custom:{options}", 2)[0], ragged("auto", 1)) < TOLERANCE


@pytest.mark.parametrize(
    "strategy",
    [
        "fsdp_custom:pipeline=2,accumulation_sync=every",
        "fsdp_custom:pipeline=2,accumulation_sync=last",
        "fsdp_custom:pipeline=2,replicate=2",
        "fsdp_custom:pipeline=2,replicate=2,accumulation_sync=last",
    ],
)
def test_accumulation(ranks: Any, strategy: str) -> None:
    expected = reference("deep_tied", accumulate_grad_batches=2)
    ours = ranks(4).run(train, "deep_tied", "adamw", strategy, 4, 2, accumulate_grad_batches=2)[0]
    assert worst(ours, expected) < TOLERANCE


@pytest.mark.parametrize("case", ["deep_tied", "llama"])
def test_bf16(ranks: Any, case: str) -> None:
    """Microbatches round in other places: the largest difference read is 5e-3."""
    ours = ranks(2).run(train, case, "sgd", "pp_custom", 2, 1, precision="bf16-mixed")[0]
    assert worst(ours, reference(case, "sgd", precision="bf16-mixed")) < 2e-2


def scaled(strategy: str, num_ranks: int, num_readers: int) -> Outcome:
    """16-mixed: the loss of each microbatch is scaled. On the host, Lightning would make bf16 of it."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    return train("deep", "sgd", strategy, num_ranks, num_readers, plugins=[MixedPrecision("16-mixed", "cpu", scaler)])


def test_loss_scaling(ranks: Any) -> None:
    ours = ranks(4).run(scaled, "fsdp_custom:pipeline=2", 4, 2)[0]
    assert worst(ours, scaled("auto", 1, 1)) < 1e-3  # read: 4e-5

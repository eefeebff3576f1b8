"""Every policy under every strategy against one process. The third matrix."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision

from lightning_parallel import ConfigurationError, build_strategy
from tests.parity import BF16, TOLERANCE, Outcome, is_moving, make_trainer, train, worst

MATRIX = json.loads(Path(__file__).with_name("policy_matrix.json").read_text())


CLIPS = {"gradient_clip_val": 0.5}

FREE = {"gradient_clip_val": None}

POLICIES: dict[str, tuple[str, dict[str, Any], float]] = {
    "clip by norm": ("", CLIPS, TOLERANCE),
    "clip by value": ("", {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}, TOLERANCE),
    "accumulation_sync=every": ("accumulation_sync=every", {"accumulate_grad_batches": 2}, TOLERANCE),
    "accumulation_sync=last": ("accumulation_sync=last", {"accumulate_grad_batches": 2}, TOLERANCE),
    "accumulation_sync=auto": ("accumulation_sync=auto", {"accumulate_grad_batches": 2}, TOLERANCE),
    "recompute=full": ("recompute=full", {}, TOLERANCE),
    "recompute=every:2": ("recompute=every:2", {}, TOLERANCE),
    "recompute=selective": ("recompute=selective", {}, TOLERANCE),
    "recompute=budget:0.5": ("recompute=budget:0.5,compile=layers", {}, TOLERANCE),
    "compile=layers": ("compile=layers", {}, TOLERANCE),
    "offload=optimizer": ("offload=optimizer", {}, TOLERANCE),
    "offload=all": ("offload=all", {}, TOLERANCE),
    "optimizer_in_backward=true": ("optimizer_in_backward=true", FREE, TOLERANCE),
    "bf16-mixed": ("", {"precision": "bf16-mixed"}, BF16),
    "bf16-true": ("", {"precision": "bf16-true"}, BF16),
    "16-mixed": ("", {"precision": "16-mixed"}, BF16),
    "float8=tensorwise": ("float8=tensorwise:emulate", {}, BF16),
    "float8=rowwise": ("float8=rowwise:emulate", {}, BF16),
}
"""Policy -> options of the strategy, arguments of the Trainer for both runs, largest difference allowed."""

NAMES = (
    "dp_custom", "ddp_custom", "zero1_custom", "zero2_custom", "fsdp_custom", "hsdp_custom", "cp_custom", "tp_custom",
    "pp_custom",
)  # fmt: skip

SLOW = 180.0
"""Seconds for a job that compiles: two ranks and the compiler share two cores."""


def run(strategy: str, num_ranks: int, trainer: dict[str, Any]) -> Outcome:
    if trainer.get("precision") == "16-mixed":  # Lightning takes bf16-mixed on the CPU, unless it is given the plugin
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
        trainer = {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}
    return train("byte_gpt", "adamw", strategy, num_ranks, **trainer)


def reference(policy: str) -> Outcome:
    """Plain Lightning in one process, with what the Trainer is given; in fp32 where the policy is another dtype."""
    _, trainer, _ = POLICIES[policy]
    return run("auto", 1, {key: value for key, value in trainer.items() if key != "precision"})


@pytest.mark.parametrize("policy", POLICIES)
def test_policies_equal_one_process(ranks: Any, policy: str) -> None:
    options, trainer, tolerance = POLICIES[policy]
    expected = reference(policy)
    assert is_moving(expected)
    found = {name: outcome_of(ranks, name, options, trainer, expected, tolerance) for name in NAMES}
    assert found == MATRIX["cells"][policy]


def outcome_of(
    ranks: Any, name: str, options: str, trainer: dict[str, Any], expected: Outcome, tolerance: float
) -> str:
    size = {"dp_custom": 1, "hsdp_custom": 4}.get(name, 2)
    strategy = f"{name}:{options}" if options else name
    try:
        make_trainer(build_strategy(strategy), size)
    except ConfigurationError as error:
        return f"refused: {error}".replace("\n", " ").partition("; Possible")[0].partition(". Possible")[0]
    ours = run(strategy, 1, trainer) if size == 1 else ranks(size).run(run, strategy, size, trainer, deadline=SLOW)[0]
    assert len(ours.losses) == len(expected.losses)
    losses = max(abs(a - b) / abs(b) for a, b in zip(ours.losses, expected.losses, strict=True))
    measure = losses if tolerance == BF16 else worst(ours, expected)
    assert measure <= tolerance, (name, measure)  # never NaN: a comparison with it is false
    assert is_moving(ours)
    return "runs"


def test_the_matrix_is_complete() -> None:
    assert list(MATRIX["cells"]) == MATRIX["policies"] == list(POLICIES)
    assert MATRIX["names"] == list(NAMES)

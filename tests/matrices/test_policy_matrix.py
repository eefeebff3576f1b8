"""Every policy under every strategy against one process, and a proof that it was applied. The third matrix."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision

from lightning_parallel import ConfigurationError, build_strategy
from tests.compiler import writing_code
from tests.data import STEPS
from tests.evidence import Watch
from tests.parity import BF16, TOLERANCE, Outcome, difference, is_moving, largest, make_trainer, once, train, worst

MATRIX = json.loads(Path(__file__).with_name("policy_matrix.json").read_text())


CLIPS = {"gradient_clip_val": 0.05}
"""Less than the norms of the gradients, which are some 0.45."""

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


Found = Counter[str]


def repeats(found: Found) -> bool:
    return found["repeated"] == found["forwards"] > 0


def products_in(dtype: str) -> Callable[[Found], bool]:
    """All linear maps compute in `dtype`."""
    return lambda found: [key for key in found if key.startswith("products in")] == [f"products in torch.{dtype}"]


def holds_only(found: Found, dtype: str) -> bool:
    return [key for key in found if key.startswith("parameters in")] == [f"parameters in torch.{dtype}"]


APPLIED: dict[str, tuple[str, Callable[[Found], bool]]] = {
    "accumulation_sync=every": ("gradients", lambda found: found["reduced"] == found["parameters"] > 0),
    # Without any gradient where shards wait for it, with gradients that differ where every rank keeps whole ones.
    "accumulation_sync=last": ("gradients", lambda found: found["reduced"] == 0 < found["parameters"]),
    "accumulation_sync=auto": ("gradients", lambda found: found["reduced"] == 0 < found["parameters"]),
    "recompute=full": ("forwards", lambda found: repeats(found) and found["attentions repeated"] > 0),
    "recompute=every:2": ("forwards", lambda found: 0 < found["repeated"] < found["forwards"]),
    "recompute=selective": ("forwards", lambda found: repeats(found) and found["attentions repeated"] == 0),
    "recompute=budget:0.5": ("graphs", lambda found: found["compiled"] > 0),  # for the budget, see `test_compiling.py`
    "compile=layers": ("graphs", lambda found: found["compiled"] > 0),
    "offload=optimizer": (
        "host",
        lambda found: found["on host"] == found["state"] > 0 and found["to device"] >= STEPS * found["state"],
    ),
    "offload=all": ("", lambda found: found["units"] > 0),  # on the CPU it is sharding, and nothing else
    "optimizer_in_backward=true": ("gradients", lambda found: found["gradients"] == 0 < found["parameters"]),
    "bf16-mixed": ("forwards", products_in("bfloat16")),
    "bf16-true": (
        "forwards",
        lambda found: products_in("bfloat16")(found) and found["parameters in torch.bfloat16"] > 0,
    ),
    "16-mixed": ("forwards", products_in("float16")),
    "float8=tensorwise": ("forwards", lambda found: found["float8 tensorwise"] > 0 == found["float8 axiswise"]),
    "float8=rowwise": ("forwards", lambda found: found["float8 axiswise"] > 0 == found["float8 tensorwise"]),
}
"""Policy -> what to watch, and whether what all ranks found together proves that the policy was applied.

Clipping changes the numbers of the reference, too: `test_policies_equal_one_process` compares it with one without.
"""

UNSEEN = {
    ("accumulation_sync", "tp_custom"),
    ("accumulation_sync", "pp_custom"),
    ("accumulation_sync=every", "hsdp_custom"),
    ("compile=layers", "tp_custom"),
}
"""Beginning of a policy, and name: what cannot be seen here.

Two ranks of one reader reduce no gradients; under HSDP, shards wait for their all-reduce (`test_accumulation.py` counts
both). The GPT has its number of heads written into its layers, which are not compiled then (`test_split_layers.py`
compiles others).
"""


def run(strategy: str, num_ranks: int, trainer: dict[str, Any], subject: str) -> tuple[Outcome, Found]:
    if trainer.get("precision") == "16-mixed":  # Lightning takes bf16-mixed on the CPU, unless it is given the plugin
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
        trainer = {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}
    watch = Watch(subject)
    compiling = writing_code() if strategy.endswith(":compile=layers") else contextlib.nullcontext()
    with compiling:
        return train("byte_gpt", "adamw", strategy, num_ranks, watching=[watch], **trainer), watch.found


def reference(policy: str) -> Outcome:
    """Plain Lightning in one process, with what the Trainer is given; in fp32 where the policy is another dtype."""
    _, trainer, _ = POLICIES[policy]
    outcome: Outcome
    outcome, _ = once(run_as_text, json.dumps({key: value for key, value in trainer.items() if key != "precision"}))
    assert is_moving(outcome)
    return outcome


def run_as_text(trainer: str) -> tuple[Outcome, Found]:
    """The same in one process, from arguments that can be looked up."""
    return run("auto", 1, json.loads(trainer), "")


@pytest.mark.parametrize("policy", POLICIES)
def test_policies_equal_one_process(ranks: Any, policy: str) -> None:
    options, trainer, tolerance = POLICIES[policy]
    expected = reference(policy)
    if policy.startswith("clip"):
        assert difference(expected.final, reference("optimizer_in_backward=true").final) > 1e-3  # it does clip
    found = {name: outcome_of(ranks, name, policy, options, trainer, expected, tolerance) for name in NAMES}
    assert found == MATRIX["cells"][policy]


def outcome_of(
    ranks: Any, name: str, policy: str, options: str, trainer: dict[str, Any], expected: Outcome, tolerance: float
) -> str:
    size = {"dp_custom": 1, "hsdp_custom": 4}.get(name, 2)
    strategy = f"{name}:{options}" if options else name
    try:
        make_trainer(build_strategy(strategy), size)
    except ConfigurationError as error:
        return f"refused: {error}".replace("\n", " ").partition("; Possible")[0].partition(". Possible")[0]
    subject, is_applied = APPLIED.get(policy, ("", None))
    if any(policy.startswith(beginning) and name == other for beginning, other in UNSEEN):
        subject, is_applied = "", None
    arguments = strategy, size, trainer, subject
    results = [run(*arguments)] if size == 1 else ranks(size).run(run, *arguments, deadline=SLOW)
    ours = results[0][0]
    evidence = sum((each for _, each in results), Counter[str]())
    assert is_applied is None or is_applied(evidence), (name, evidence)
    assert len(ours.losses) == len(expected.losses)
    losses = largest(abs(a - b) / abs(b) for a, b in zip(ours.losses, expected.losses, strict=True))
    measure = losses if tolerance == BF16 else worst(ours, expected)
    assert measure <= tolerance, (name, measure)  # never NaN: a comparison with it is false
    assert is_moving(ours)
    return "runs"


def test_the_matrix_is_complete() -> None:
    assert list(MATRIX["cells"]) == MATRIX["policies"] == list(POLICIES)
    assert MATRIX["names"] == list(NAMES)
    assert MATRIX["same_on_the_cpu"].keys() <= {*NAMES, *POLICIES}
    assert set(APPLIED) == {policy for policy in POLICIES if not policy.startswith("clip")}

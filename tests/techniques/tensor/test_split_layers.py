"""Tensor parallel: linear maps and heads split over ranks, and numbers equal to those of one process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.models.tables import TENSOR_MODULES
from tests.parity import TOLERANCE, assert_same_training, reference, train, worst


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("case", TENSOR_MODULES)
def test_two_ranks_share_each_layer(ranks: Any, case: str, optimizer: str) -> None:
    assert_same_training(
        ranks(2).run(train, case, optimizer, "tp_custom", 2, 1, norms=True)[0], reference(case, optimizer, norms=True)
    )


@pytest.mark.parametrize("case", ["llama", "one_key_head", "hard", "t5", "vit", "padded_encoder", "qwen3"])
def test_four_ranks_share_each_layer(ranks: Any, case: str) -> None:
    """Llama has two heads of keys and values, which stay whole."""
    assert_same_training(
        ranks(4).run(train, case, "adamw", "tp_custom", 4, 1, norms=True)[0], reference(case, norms=True)
    )


PRODUCTS = [
    ("fsdp_tp_custom", 2),
    ("hsdp_custom:replicate=2,tensor=2", 2),
    ("fsdp_custom:tensor=2,context=2", 1),
    ("zero2_custom:tensor=2", 2),
    ("fsdp_offload_custom:tensor=2", 2),
]


@pytest.mark.parametrize(("strategy", "readers"), PRODUCTS)
@pytest.mark.parametrize("case", ["llama", "hard", "demo", "hf_gpt2", "configure_model"])
def test_products(ranks: Any, case: str, strategy: str, readers: int) -> None:
    if strategy.startswith(("zero2", "fsdp_offload")) and case not in ("hard", "configure_model"):
        pytest.skip("one module with each way to build it is enough for these")
    if "context" in strategy and case not in ("llama", "hard", "demo"):
        pytest.skip("it has two heads")
    assert_same_training(
        ranks(4).run(train, case, "adamw", strategy, 4, readers, norms=True)[0], reference(case, norms=True)
    )


@pytest.mark.parametrize(
    "policies",
    ["recompute=full", "recompute=selective", "compile=layers", "recompute=full,compile=layers", "offload=optimizer"],
)
@pytest.mark.parametrize("case", ["llama", "byte_gpt"])
def test_layer_policies(ranks: Any, case: str, policies: str) -> None:
    if case == "byte_gpt" and "compile" in policies:
        pytest.skip("DTensors run through its layers, which takes the compiler a minute: see the matrix of policies")
    found = ranks(4).run(train, case, "adamw", f"fsdp_tp_custom:{policies}", 4, 2, norms=True)[0]
    assert_same_training(found, reference(case, norms=True))


@pytest.mark.parametrize("sync", ["last", "every"])
@pytest.mark.parametrize("strategy", ["fsdp_tp_custom", "hsdp_custom:replicate=2,tensor=2"])
def test_accumulation(ranks: Any, strategy: str, sync: str) -> None:
    text = f"{strategy}{',' if ':' in strategy else ':'}accumulation_sync={sync}"
    ours = ranks(4).run(train, "hard", "adamw", text, 4, 2, accumulate_grad_batches=2, norms=True)[0]
    theirs = reference("hard", "adamw", accumulate_grad_batches=2, norms=True)
    assert worst(ours, theirs) < TOLERANCE
    assert ours.norms == pytest.approx(theirs.norms, abs=TOLERANCE)


@pytest.mark.parametrize("case", ["llama", "hard", "encoder", "hf_gpt2"])
def test_mixed_precision(ranks: Any, case: str) -> None:
    """bfloat16 has 8 bits of mantissa."""
    ours = ranks(4).run(train, case, "adamw", "fsdp_tp_custom", 4, 2, precision="bf16-mixed", norms=True)[0]
    theirs = reference(case, precision="bf16-mixed", norms=True)
    assert ours.losses == pytest.approx(theirs.losses, abs=2e-2)


@pytest.mark.parametrize(("threshold", "algorithm"), [(0.01, "norm"), (0.001, "value"), (None, "norm")])
def test_clipping(ranks: Any, threshold: float | None, algorithm: str) -> None:
    kwargs = {"gradient_clip_val": threshold, "gradient_clip_algorithm": algorithm}
    ours = ranks(4).run(train, "hard", "sgd", "fsdp_tp_custom", 4, 2, **kwargs, norms=True)[0]
    assert_same_training(ours, reference("hard", "sgd", **kwargs, norms=True))


# The user's own plan ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "plan",
    [
        "{up: colwise, down: rowwise}",
        "{q: colwise, k: colwise, v: colwise, o: rowwise}",
        "{blocks.*.up: colwise, blocks.*.down: rowwise, o: replicate}",
        "{blocks.0.up: colwise, blocks.0.down: rowwise}",
        "{down: rowwise}",
        "{up: colwise}",
        "{up: rowwise, down: colwise}",
        "{q: colwise, k: colwise, v: colwise}",
    ],
)
def test_own_plan(ranks: Any, plan: str) -> None:
    """Some of these split less than they could; their numbers are right."""
    ours = ranks(2).run(train, "hard", "adamw", f"tp_custom:tensor_plan={plan}", 2, 1, norms=True)[0]
    assert_same_training(ours, reference("hard", norms=True))

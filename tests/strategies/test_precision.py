"""Precisions under every strategy: close to one process, and never a step that only some ranks take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_parallel import DtypePolicy, MeshStrategy
from lightning_parallel.dtypes import POLICIES, precision_violations
from tests.collectives import collectives_of_a_window
from tests.jobs.half_precision import ended_and_begun, half_precision, in_bf16, scale_after, scaled_gan
from tests.parity import difference, once

NAMES = ["ddp_custom", "zero1_custom", "zero2_custom", "fsdp_custom"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", ["byte_gpt", "bare_parameter", "conv_net"])
def test_a_gradient_that_is_not_finite_skips_the_step_on_all_ranks(ranks: Any, name: str, case: str) -> None:
    (scale, weights), (other, _) = ranks(2).run(half_precision, name, 2, None, case)
    assert scale == other == 256
    (skipped_scale, skipped), (other, _) = ranks(2).run(half_precision, name, 2, 1, case)
    assert skipped_scale == other == 128
    assert all(value.isfinite().all() for value in skipped.values())
    assert 0 < difference(skipped, weights) < 0.5


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", ["byte_gpt", "hf_gpt2", "conv_net", "lstm", "bare_parameter"])
def test_bf16_is_close_to_one_process(ranks: Any, name: str, case: str, precision: str) -> None:
    if case == "lstm" and precision == "bf16-mixed" and not torch_has_lstm_in_bf16():
        pytest.skip("torch has no LSTM in bf16 on this CPU")
    reference = once(in_bf16, "auto", 1, precision, case)
    assert ranks(2).run(in_bf16, name, 2, precision, case)[0] == pytest.approx(reference, rel=2e-2)


def torch_has_lstm_in_bf16() -> bool:
    """Whether one process could train it, too."""
    try:
        with torch.autocast("cpu", torch.bfloat16):
            torch.nn.LSTM(8, 8)(torch.randn(2, 3, 8))
    except RuntimeError:
        return False
    return True


def test_unknown_precisions_are_refused() -> None:
    assert precision_violations("32-true") == []
    assert all(name in precision_violations("8-true")[0] for name in POLICIES)


@pytest.mark.parametrize(
    ("first", "second", "size"), [("fsdp_custom", "ddp_custom", 2), ("zero1_custom", "hsdp_custom", 4)]
)
def test_the_loss_scale_is_resumed(ranks: Any, first: str, second: str, size: int, tmp_path: Path) -> None:
    path = str(tmp_path / "scaled.ckpt")
    assert ranks(2).run(scale_after, first, 2, None, path) == [2.0**9] * 2  # grew once
    assert ranks(size).run(scale_after, second, size, path, None) == [2.0**10] * size
    assert scale_after("auto", 1, path, None) == 2.0**10


@pytest.mark.parametrize("name", [*NAMES, "hsdp_custom"])
def test_scaling_with_two_optimizers_and_whole_parameters(ranks: Any, name: str) -> None:
    """Under manual optimization a parameter of its own stays whole, beside sharded ones of the same optimizer."""
    size = 4 if name == "hsdp_custom" else 2
    reference = once(scaled_gan, "auto", 1)
    assert difference(ranks(size).run(scaled_gan, name, size)[0], reference) < 2e-2


# Dtypes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("precision", "gathers", "reduces"),
    [
        ("32-true", torch.float32, torch.float32),
        ("bf16-mixed", torch.bfloat16, torch.float32),
        ("bf16-true", torch.bfloat16, torch.bfloat16),
    ],
)
@pytest.mark.parametrize(("name", "size"), [("fsdp_custom", 2), ("zero2_custom", 2), ("hsdp_custom", 4)])
def test_dtypes_of_collectives(ranks: Any, name: str, size: int, precision: str, gathers: Any, reduces: Any) -> None:
    counts = ranks(size).run(collectives_of_a_window, name, 1, precision=precision)[0]
    assert counts.dtypes("gather") == {gathers}, counts
    assert counts.dtypes("reduce_scatter") == {reduces}, counts


def own_policy(as_text: bool) -> Any:
    if as_text:
        return collectives_of_a_window("fsdp_custom:precision_policy={param: bfloat16, reduce: bfloat16}")
    policy = DtypePolicy(param=torch.bfloat16, reduce=torch.bfloat16)
    return collectives_of_a_window(MeshStrategy(precision_policy=policy))


@pytest.mark.parametrize("as_text", [True, False])
def test_a_policy_of_ones_own(ranks: Any, as_text: bool) -> None:
    counts = ranks(2).run(own_policy, as_text)[0]
    assert counts.dtypes("gather") == counts.dtypes("reduce_scatter") == {torch.bfloat16}


@pytest.mark.parametrize("name", ["dp_custom", "ddp_custom", "fsdp_custom"])
def test_fp64_is_resumed_in_every_bit(ranks: Any, name: str, tmp_path: Path) -> None:
    """Lightning loads weights into the module before it converts that to fp64."""
    path = str(tmp_path / "fp64.ckpt")
    if name == "dp_custom":
        ended, begun = ended_and_begun(name, 1, path)
    else:
        ended, begun = ranks(2).run(ended_and_begun, name, 2, path)[0]
    assert any(not torch.equal(value, value.float().double()) for value in ended.values())
    assert difference(begun, ended) == 0.0

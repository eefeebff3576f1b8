"""Policies of any technique: what cannot hold, and what is left after fits."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from torch import Tensor

from lightning_parallel import ConfigurationError, build_strategy, full_state_dict
from tests.data import loader
from tests.jobs.lifecycle import fit_twice
from tests.models.cases import CASES, ByteGPT
from tests.parity import TOLERANCE, difference, make_trainer, trainer_for


def resumed(strategy: str, num_ranks: int, path: str, saves: bool) -> dict[str, Any]:
    L.seed_everything(3 if saves else 11, verbose=False)
    trainer = trainer_for(strategy, num_ranks, max_epochs=1 if saves else 2)
    trainer.fit(CASES["parameter_groups"]("adamw"), loader(num_ranks), ckpt_path=None if saves else path)
    if saves:
        trainer.save_checkpoint(path)
    return full_state_dict(trainer)


@pytest.mark.parametrize("option", ["optimizer_in_backward=true", "offload=optimizer", "recompute=full"])
def test_policies_after_resume(ranks: Any, option: str, tmp_path: Path) -> None:
    path = str(tmp_path / "half.ckpt")
    ranks(2).run(resumed, "ddp_custom", 2, path, saves=True)
    expected = resumed("auto", 1, path, saves=False)
    assert difference(ranks(2).run(resumed, f"fsdp_custom:{option}", 2, path, saves=False)[0], expected) < TOLERANCE


@pytest.mark.parametrize(
    ("options", "case"),
    [
        ("recompute=full", "hf_gpt2"),
        ("recompute=selective", "hf_gpt2"),
        ("recompute=selective", "encoder_decoder"),
        ("recompute=full", "configure_model"),
        ("float8=tensorwise:emulate", "byte_gpt"),
        ("float8=tensorwise:emulate", "configure_model"),
    ],
)
@pytest.mark.parametrize("name", ["ddp_custom", "fsdp_custom"])
def test_other_modules_come_back_plain(ranks: Any, name: str, options: str, case: str) -> None:
    found = ranks(2).run(fit_twice, f"{name}:{options}", "fsdp_custom", 2, case)[0]
    assert found["marks"] == []
    assert all(found["same objects"]) or case == "configure_model"
    assert found["equal copies"]


@pytest.mark.parametrize(
    ("strategy", "trainer", "words"),
    [
        ("fsdp_custom:recompute=some", {}, ["recompute='some'", "every:2", "selective"]),
        ("fsdp_custom:recompute=every:0", {}, ["every:0"]),
        ("fsdp_custom:recompute=budget:0.5", {}, ["compile='none'", "compile='layers'", "selective"]),
        ("ddp_custom:recompute=budget:2,compile=layers", {}, ["budget:2"]),
        ("ddp_custom:compile=all", {}, ["compile='all'", "none, layers"]),
        ("fsdp_custom:float8=tensorwise", {}, ["compute capability 8.9", "the device is cpu", "tensorwise:emulate"]),
        ("zero1_custom:float8=fp4:emulate", {}, ["float8='fp4:emulate'", "tensorwise, rowwise"]),
        ("fsdp_custom:accumulation_sync=never", {}, ["accumulation_sync='never'", "auto, every, last"]),
        ("ddp_custom:accumulation_sync=some,offload=all", {}, ["2 problems", "fsdp_offload_custom", "'some'"]),
        ("ddp_custom:reshard=2", {}, ["no option 'reshard'", "whole on every rank", "fsdp_custom"]),
        ("fsdp_custom:precision_policy={param: int8}", {}, ["param='int8'", "bfloat16"]),
    ],
)
def test_what_cannot_hold_is_refused(strategy: str, trainer: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        make_trainer(build_strategy(strategy), 2, **trainer)
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)


@pytest.mark.parametrize(
    ("strategy", "case", "trainer", "words"),
    [
        ("fsdp_custom:recompute=full,compile=layers", "lstm", {}, ["recompute='full'", "compile='layers'", "no stack"]),
        ("ddp_custom:recompute=full", "lstm", {}, ["LSTMModel has no stack", "layers="]),
        ("dp_custom:compile=layers", "lstm", {}, ["no stack"]),
        (
            "fsdp_custom:optimizer_in_backward=true,offload=optimizer",
            "byte_gpt",
            {"gradient_clip_val": 1.0, "accumulate_grad_batches": 2},
            ["gradient_clip_val", "accumulate_grad_batches=2", "offload='all'", "3 problems"],
        ),
        ("fsdp_custom:optimizer_in_backward=true", "gan", {}, ["manual optimization"]),
    ],
)
def test_what_the_module_cannot_do_is_refused(
    strategy: str, case: str, trainer: dict[str, Any], words: list[str]
) -> None:
    size = 1 if strategy.startswith("dp_") else 2
    with pytest.raises(ConfigurationError) as caught:
        make_trainer(build_strategy(strategy), size, **trainer).fit(CASES[case](), loader(1, 1, case))
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)


class Breaks(ByteGPT):
    broken = True

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.broken and batch_idx == 1:
            raise RuntimeError("broken")
        return super().training_step(batch, batch_idx)


def after_an_error() -> list[str]:
    module = Breaks("sgd")
    with contextlib.suppress(RuntimeError):
        trainer_for("fsdp_custom", 2).fit(module, loader(2))
    module.broken = False
    try:
        trainer_for("fsdp_custom:recompute=full", 2).fit(module, loader(2))
    except ConfigurationError as error:
        return list(error.violations)
    return []


def test_other_policies_after_an_error_are_refused(ranks: Any) -> None:
    assert "cannot be sharded by other rules (layer:" in ranks(2).run(after_an_error)[0][0]

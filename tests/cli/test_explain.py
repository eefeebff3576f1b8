"""What a strategy would do, in words, without a process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import yaml

from lightning_parallel import build_strategy, explain
from tests.cli.command import CONFIG, run
from tests.models.tables import TENSOR_MODULES
from tests.parity import make_trainer


@pytest.fixture(autouse=True)
def _no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subprocess.Popen", lambda *args, **kwargs: pytest.fail("a process was started"))


def explained(case: str, strategy: str, num_ranks: int) -> list[str]:
    text = explain(make_trainer(build_strategy(strategy), num_ranks), TENSOR_MODULES[case]())
    assert not dist.is_initialized()
    return [line.strip() for line in text.splitlines()]


def test_a_plan_of_the_model() -> None:
    lines = explained("llama", "fsdp_tp_custom", 8)
    layers = "model.model.layers.*"
    assert "stack model.model.layers: 3 x LlamaDecoderLayer, 6,208 parameters each" in lines
    assert "8 ranks = replicate 1 x shard 4 x context 1 x tensor 2 x pipeline 1; 4 read different samples" in lines
    assert "tensor parallel over 2 ranks, by the model's own _tp_plan" in lines
    assert f"{layers}.self_attn.k_proj: colwise, [16, 32] -> [8, 32]" in lines
    assert f"{layers}.self_attn.o_proj: rowwise, [32, 32] -> [32, 16]" in lines
    branches = "forward 2 all-reduces (self_attn.o_proj, mlp.down_proj); backward 2 all-reduces"
    assert f"{layers}: {branches}" in lines
    assert "model.model.layers.*.self_attn.k_proj: whole, [16, 32]" in explained("llama", "tp_custom", 4)


@pytest.mark.parametrize(
    ("case", "strategy", "expected"),
    [
        ("encoder", "tp_custom", ["encoder.layers.*.self_attn: heads, 4 -> 2"]),
        (
            "encoder", "tp_custom:tensor_plan={self_attn: replicate, linear1: colwise, linear2: rowwise}",
            ["encoder.layers.*.self_attn: whole", "encoder.layers.*.linear1: colwise, [32, 16] -> [16, 16]"],
        ),
        (
            "byte_gpt", "tp_custom:sequence=true,tensor_plan={head: vocab}",
            ["model.head: vocab, [32, 16] -> [16, 16]"],
        ),
        ("hf_gpt2", "tp_custom", ["model.transformer.h.*.attn.c_attn: colwise, [16, 48] -> [16, 24]"]),
        ("configure_model", "tp_custom", ["model.blocks.*.mlp.0: colwise, [64, 16] -> [32, 16]"]),
        (
            "hard", "tp_custom:tensor_plan={blocks.0.up: colwise}",
            ["blocks.[0].up: colwise, [64, 16] -> [32, 16]", "blocks.[1, 2].up: whole, [64, 16]",
             "blocks.[0]: no branch is closed", "blocks.[1, 2]: not split"],
        ),
        ("hard", "fsdp_custom", ["tensor=1: no linear map is split"]),
        (
            "hard", "pp_custom",
            ["2 ranks = replicate 1 x shard 1 x context 1 x tensor 1 x pipeline 2; all read the same samples",
             "pipeline over 2 ranks, schedule 1f1b, microbatches auto",
             "stage 0 on rank 0 of the pipeline: blocks.0 to blocks.1, 7,072 parameters",
             "stage 1 on rank 1 of the pipeline: blocks.2 to blocks.2, 3,824 parameters"],
        ),
        (
            "hard", "pp_custom:stages=[1,3]",
            ["pipeline=2 is refused",
             "stages=[1, 3] are 4 layers, but blocks has 3; give 2 numbers with sum 3, or 'auto'"],
        ),
        (
            "hard", "cp_custom",
            ["sequences split over 2 ranks in blocks: an attention is four all-to-alls forward, four backward"],
        ),
        (
            "hard", "cp_custom:context_attention=ring",
            ["sequences split over 2 ranks in blocks: an attention sends keys and values 1 times forward, 1 times and "
             "gradients 2 times backward"],
        ),
        ("hard", "ddp_custom", ["DDPStrategy on 2 ranks: it has no degrees, and splits no layer"]),
        (
            "hard", "tp_custom:tensor_plan={upp: colwise}",
            ["tensor=2 is refused", "tensor_plan: 'upp' names no linear map of the layers; there are up"],
        ),
    ],
)  # fmt: skip
def test_other_plans(case: str, strategy: str, expected: list[str]) -> None:
    lines = explained(case, strategy, 2)
    assert [line for line in expected if line not in lines] == [], lines


@pytest.mark.parametrize(
    ("strategy", "where", "memory"),
    [
        ("fsdp_custom", "4 ranks", "a rank keeps 10.9 KiB of 43.6 KiB"),
        ("hsdp_custom", "2 ranks, in 2 copies,", "a rank keeps 21.8 KiB of 43.6 KiB"),
        ("fsdp_custom:context=2", "4 ranks", "the largest unit has 12.8 KiB when it is gathered (model.blocks.0)"),
        ("zero2_custom", "4 ranks", "from forward to backward all are gathered, 43.6 KiB"),
    ],
)
def test_what_a_rank_keeps(strategy: str, where: str, memory: str) -> None:
    lines = explained("byte_gpt", strategy, 4)
    at = lines.index(f"sharded over {where} in 4 units: model.blocks.*, the rest with the module itself")
    assert memory in lines[at + 1]


def test_what_is_gathered_in_16_bits() -> None:
    trainer = make_trainer(build_strategy("fsdp_custom"), 4, precision="bf16-mixed")
    text = explain(trainer, TENSOR_MODULES["byte_gpt"]())
    assert "a rank keeps 10.9 KiB of 43.6 KiB" in text
    assert "the largest unit has 6.4 KiB when it is gathered (model.blocks.0)" in text


def test_what_tensor_parallelism_splits_is_not_counted_whole() -> None:
    assert not [line for line in explained("byte_gpt", "fsdp_tp_custom", 4) if "a rank keeps" in line]


def test_the_module_is_not_changed() -> None:
    module = TENSOR_MODULES["configure_model"]()
    trainer = make_trainer(build_strategy("tp_custom"), 2)
    assert explain(trainer, module) == explain(trainer, module)
    assert module.model is None


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({**CONFIG, "model": {"class_path": "tests.models.layered.Hard"}}))
    arguments: Any = ("--config", str(path), "--trainer.devices=2")
    assert run(monkeypatch, "explain", *arguments, "--strategy=tp_custom") == 0
    assert "blocks.*.down: rowwise, [16, 64] -> [16, 32]" in capsys.readouterr().out
    assert run(monkeypatch, "explain", *arguments, "--strategy=tp_custom:tensor_plan={upp: colwise}") == 2
    out, err = capsys.readouterr()
    assert "tensor=2 is refused" in out
    assert "'upp' names no linear map" in err

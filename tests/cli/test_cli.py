from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lightning_parallel.cli import devices, lightning_cli
from lightning_parallel.presets import PRESETS
from tests.cli.command import CONFIG, ROOT, run


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "given.yaml"
    path.write_text(yaml.safe_dump(CONFIG))
    return str(path)


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher notes its rank in the environment; `sys.path` gets the working directory."""
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def test_help(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch) == 0
    out = capsys.readouterr().out
    assert "fit | validate | test | predict" in out
    assert "strategies" in out
    assert run(monkeypatch, "fit", "--help") == 0
    assert "--strategy NAME[:OPTION=VALUE,...]" in capsys.readouterr().out


def test_strategies(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "strategies") == 0
    out = capsys.readouterr().out
    assert all(name in out for name in PRESETS)
    assert "reshard=never" in out
    assert "comm_hook=none" in out
    assert "timeout=1800" in out
    assert run(monkeypatch, "strategies", "ddp_custom") == 0
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines() if not line.startswith(" ")] == ["ddp_custom"]
    assert "How gradients travel" in out
    assert run(monkeypatch, "strategies", "fsdp") == 2
    assert "did you mean fsdp_custom" in capsys.readouterr().err


def test_devices(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "devices") == 0
    assert capsys.readouterr().out.strip()


def test_one_argument_in_yaml_and_on_the_command_line(
    monkeypatch: pytest.MonkeyPatch, config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One rank, in this process: the three ways to say it give the same numbers."""
    losses = []
    with_name = yaml.safe_load(Path(config).read_text()) | {"strategy": "fsdp_custom:reshard=never"}
    with_class = yaml.safe_load(Path(config).read_text())
    with_class["trainer"]["strategy"] = {
        "class_path": "lightning_parallel.MeshStrategy",
        "init_args": {"reshard": "never"},
    }
    for name, content in (("name.yaml", with_name), ("class.yaml", with_class)):
        (tmp_path / name).write_text(yaml.safe_dump(content))
    for arguments in (
        ("--config", config),
        ("--config", config, "--strategy=fsdp_custom:reshard=never"),
        ("--config", config, "--strategy=ddp_custom"),
        ("--config", str(tmp_path / "name.yaml")),
        ("--config", str(tmp_path / "class.yaml")),
    ):
        assert run(monkeypatch, "fit", *arguments, "--trainer.devices=1") == 0
        losses.append([line for line in capsys.readouterr().out.splitlines() if line.startswith("last loss")])
    assert yaml.safe_load(Path(config).read_text()) == CONFIG  # without a logger nothing is written
    assert not Path("config.yaml").exists()
    assert losses[0]
    assert all(one == losses[0] for one in losses)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--strategy=fsdp_costum"], ["did you mean fsdp_custom", "hsdp_custom"]),
        (["--strategy=fsdp_custom:reshrad=2,shard=x"], ["2 problems", "reshard", "shard='x'"]),
        (["--strategy=hsdp_custom", "--trainer.devices=3"], ["even number"]),
        (["--strategy=fsdp_custom", "--trainer.devices=0,2"], ["the host is one device", "devices that are there"]),
        (["--strategy=fsdp_custom", "--trainer.accelerator=gpu"], ["no CUDA device", "devices that are there"]),
        (["--strategy=fsdp_custom", "--trainer.strategy=ddp"], ["both given"]),
        (["--strategy=ddp_custom", "--trainer.precision=16-mixed"], ["16-mixed", "bf16-mixed"]),
        (
            ["--strategy=fsdp_costum", "--trainer.devices=0,2", "--trainer.precision=16-mixed"],
            ["3 problems", "fsdp_custom", "one device", "16-mixed"],
        ),
        (["--strategy=fsdp_custom:layers=net.nope", "--trainer.devices=2"], ["'net.nope' does not exist"]),
    ],
)
def test_bad_input(
    monkeypatch: pytest.MonkeyPatch,
    config: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: list[str],
) -> None:
    assert run(monkeypatch, "fit", "--config", config, *arguments) == 2
    error = capsys.readouterr().err
    for word in words:
        assert word in error
    assert "Traceback" not in error
    assert [path.name for path in tmp_path.iterdir()] == ["given.yaml"]


@pytest.mark.slow
def test_two_processes_say_it_once(config: str, tmp_path: Path) -> None:
    """From the shell, with ranks that were started by something else: one message, status 2 everywhere, no files."""
    script = [sys.executable, "-c", "from lightning_parallel.cli.main import main; main()"]
    arguments = ["fit", "--config", config, "--strategy=fsdp_custom:reshard=7", "--trainer.devices=2"]
    ranks = [
        subprocess.Popen(
            [*script, *arguments],
            env={**os.environ, "LOCAL_RANK": str(rank), "NODE_RANK": "0", "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [2, 2]
    assert "".join(errors).count("reshard=7 is not possible with shard=2") == 1
    assert "refused; rank 0" not in "".join(errors)
    assert [path.name for path in tmp_path.iterdir()] == ["given.yaml"]


def test_devices_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(devices, "visible_devices", lambda: ["cuda:0  A  1 GiB", "cuda:1  B  1 GiB"])
    for given in ("0,2", [0, 2]):
        (message,) = devices.device_violations("gpu", given)
        assert "there is no device 2" in message
        assert "cuda:0  A  1 GiB; cuda:1  B  1 GiB" in message
    assert "there are 2" in devices.device_violations("auto", 3)[0]
    assert devices.device_violations("cuda", "0,1") == []
    assert devices.device_violations("auto", "auto") == []
    assert devices.device_violations("cpu", 64) == []


@pytest.mark.parametrize("given", [-5, "-5", 0, "0"])
@pytest.mark.parametrize("accelerator", ["cpu", "cuda"])
def test_no_number_of_devices(monkeypatch: pytest.MonkeyPatch, accelerator: str, given: Any) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    (message,) = devices.device_violations(accelerator, given)
    assert message.startswith(f"devices={given!r} is no number of devices; give 1 or more")


def test_all_devices_and_what_is_no_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert devices.device_violations("cuda", -1) == []
    assert "give 1 or more; " in devices.device_violations("cpu", -1)[0]
    assert devices.device_violations("mps", -1) == devices.device_violations("tpu", -1) == []
    for given in ("a,b", "some", "1.5"):
        assert "neither a number of devices nor a list" in devices.device_violations("cuda", given)[0]


POLICIES_IN_YAML: dict[str, dict[str, Any]] = {
    "--strategy": {"strategy": "fsdp_custom:recompute=every:2,accumulation_sync=last,layers=blocks"},
    "class_path": {
        "trainer": {
            "strategy": {
                "class_path": "lightning_parallel.MeshStrategy",
                "init_args": {
                    "layers": "blocks",
                    "recompute": "selective",
                    "accumulation_sync": "every",
                    "float8": "tensorwise:emulate",
                    "offload": "optimizer",
                    "precision_policy": {"reduce": "float32"},
                },
            },
        },
    },
    "ddp": {
        "trainer": {
            "strategy": {
                "class_path": "lightning_parallel.DDPStrategy",
                "init_args": {"recompute": "full", "layers": "blocks", "offload": "optimizer"},
            },
        },
    },
}

CALLBACKS: list[dict[str, Any]] = [
    {
        "class_path": "lightning_parallel.callbacks.TokenWeighted",
        "init_args": {"count": "tests.models.cli_module.count"},
    },
    {"class_path": "lightning_parallel.callbacks.GlobalBatch", "init_args": {"size": 8}},
    {"class_path": "lightning_parallel.callbacks.ScaledLearningRate", "init_args": {"reference_batch": 4}},
    {"class_path": "lightning_parallel.callbacks.GradientNorm"},
    {"class_path": "lightning_parallel.callbacks.ExponentialMovingAverage", "init_args": {"decay": 0.9}},
]


@pytest.mark.parametrize("way", POLICIES_IN_YAML)
def test_policies_are_reached_from_yaml(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, way: str
) -> None:
    given = POLICIES_IN_YAML[way]
    trainer = {**CONFIG["trainer"], **given.get("trainer", {}), "devices": 1, "callbacks": CALLBACKS}
    model = {"class_path": "tests.models.cli_module.Layered"}
    path = tmp_path / "policies.yaml"
    path.write_text(yaml.safe_dump({**CONFIG, **given, "trainer": trainer, "model": model}))
    assert run(monkeypatch, "fit", "--config", str(path)) == 0, capsys.readouterr().err
    assert "last loss" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            ["/bin/lightning-parallel", "fit", "-c", "a b.yaml"],
            "lightning-parallel test -c 'a b.yaml' --ckpt_path=new.ckpt",
        ),
        (["src/train.py", "fit", "--ckpt_path=old.ckpt"], "python src/train.py test --ckpt_path=new.ckpt"),
        (["train", "fit", "--ckpt_path", "old.ckpt", "--x=1"], "train test --x=1 --ckpt_path=new.ckpt"),
    ],
)
def test_the_command_that_tests_a_checkpoint(given: list[str], expected: str) -> None:
    assert lightning_cli._test_command(given, "new.ckpt") == expected

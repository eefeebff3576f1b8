"""What ``inspect`` says of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_parallel.checkpoint.opened import open_checkpoint
from lightning_parallel.cli.inspect_checkpoint import describe, inspect
from tests.cli.command import run
from tests.jobs.exports import ReadAnew, WithHyperParameters, damage, trained
from tests.models.pipelined import DeepTied


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("inspect") / "tied.ckpt"
    trained(DeepTied(), path)
    return path


def report(capsys: pytest.CaptureFixture[str], path: Path, *arguments: str) -> dict[str, Any]:
    assert inspect([str(path), "--json", *arguments]) == 0
    return dict(json.loads(capsys.readouterr().out))


def test_all_that_a_checkpoint_holds(tied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys, tied)
    checkpoint = torch.load(tied)
    weights = checkpoint["state_dict"]
    assert (found["form"], found["bytes"], found["damage"]) == ("whole file", tied.stat().st_size, "")
    assert found["versions"] == {"pytorch-lightning": checkpoint["pytorch-lightning_version"]}
    assert (found["epoch"], found["global_step"]) == (checkpoint["epoch"], 2)
    assert found["callbacks"] == {
        "ExponentialMovingAverage": {"tensors": len(weights) - 1, "bytes": found["totals"]["float32"]["bytes"]}
    }
    assert found["loops"] == list(checkpoint["loops"])
    assert found["tied"] == [["model.tokens.weight", "model.head.weight"]]
    assert {each["name"]: each["shape"] for each in found["tensors"]} == {
        name: list(tensor.shape) for name, tensor in weights.items()
    }
    numel = sum(tensor.numel() for name, tensor in weights.items() if name != "model.head.weight")
    assert found["totals"] == {"float32": {"tensors": len(weights) - 1, "elements": numel, "bytes": 4 * numel}}
    (optimizer,) = found["optimizers"]
    assert (optimizer["groups"], optimizer["parameters"], optimizer["states"]) == (
        1,
        len(weights) - 1,
        len(weights) - 1,
    )
    assert set(optimizer["entries"]) == {"step", "exp_avg", "exp_avg_sq"}
    assert optimizer["entries"]["exp_avg"] == {"tensors": len(weights) - 1, "bytes": 4 * numel}


def test_in_words(tied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect([str(tied)]) == 0
    out = capsys.readouterr().out
    names = list(torch.load(tied)["state_dict"])
    assert out.splitlines()[0].endswith(", intact")
    assert "global step 2" in out
    assert "tied: model.tokens.weight = model.head.weight" in out
    assert "exp_avg_sq (" in out
    assert sum(f"  {name} " in out for name in names) == 10 < len(names)
    assert f"and {len(names) - 10} smaller; --tensors lists all" in out
    assert inspect([str(tied), "--tensors"]) == 0
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in names)
    assert "smaller" not in out


def test_hyperparameters_hooks_and_dtypes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.ckpt"
    module = WithHyperParameters(16)
    module.model.norm.bfloat16()
    module.register_buffer("steps", torch.tensor(3))
    torch.save(
        {"state_dict": module.state_dict(), "hyper_parameters": dict(module.hparams), "of_hook": [torch.ones(2)]}, path
    )
    found = report(capsys, path)
    assert found["totals"]["bfloat16"] == {"tensors": 2, "elements": 32, "bytes": 64}
    assert found["totals"]["int64"] == {"tensors": 1, "elements": 1, "bytes": 8}
    assert found["hyper_parameters"] == ["note", "width"]
    assert found["others"] == {"of_hook": {"tensors": 1, "bytes": 8}}
    assert found["optimizers"] == []
    assert inspect([str(path)]) == 0
    assert "not by Lightning" in capsys.readouterr().out


def test_a_damaged_one(tied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """What can still be read is listed; the status says that it is not what was written."""
    changed, cut = damage(tied, tmp_path)
    assert run(monkeypatch, "inspect", str(changed)) == 2
    out = capsys.readouterr().out
    assert "damaged: what it says of" in out
    assert "differs from its checksum" in out
    assert "model.tokens.weight" in out
    assert run(monkeypatch, "inspect", str(cut)) == 2
    out = capsys.readouterr().out
    assert "damaged: its end is missing" in out
    assert inspect([str(cut), "--json"]) == 2
    assert "its end is missing" in json.loads(capsys.readouterr().out)["damage"]


def test_what_cannot_be_read_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    path = tmp_path / "a.ckpt"
    torch.save({"state_dict": {"a": torch.ones(2)}, "hyper_parameters": {"path": tmp_path}}, path)
    assert run(monkeypatch, "inspect", str(path)) == 2
    error = capsys.readouterr().err
    assert error.count(f"{type(tmp_path).__module__}.PosixPath") == 1  # another module in Python 3.13
    assert "--unsafe" in error
    assert "Traceback" not in error
    assert run(monkeypatch, "inspect", str(path), "--unsafe") == 0
    assert "hyperparameters: path" in capsys.readouterr().out
    assert run(monkeypatch, "inspect", str(tmp_path / "none.ckpt")) == 2
    assert "there is no file" in capsys.readouterr().err


def test_any_mapping_will_do(tied: Path) -> None:
    """Other forms of checkpoints read a tensor when it is asked for, and know nothing of ties."""
    checkpoint = open_checkpoint(tied)
    expected = describe(checkpoint)
    weights = ReadAnew(checkpoint["state_dict"])
    found = describe({**checkpoint, "state_dict": weights})
    assert found["tied"] == []
    assert [each["name"] for each in found["tensors"]] == [each["name"] for each in expected["tensors"]]
    assert found["optimizers"] == expected["optimizers"]
    assert weights.most_alive <= 3

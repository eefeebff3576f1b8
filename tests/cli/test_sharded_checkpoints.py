"""Commands that read checkpoints, given the folder of a sharded one: they say and write what they do of a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from lightning_parallel import CheckpointError
from lightning_parallel.cli.export import export
from lightning_parallel.cli.inspect_checkpoint import inspect
from tests.data import loader
from tests.jobs.exports import is_equal
from tests.models.pipelined import DeepTied
from tests.parity import trainer_for


def trained(path: Path, form: str, devices: int) -> None:
    L.seed_everything(0, verbose=False)
    trainer = trainer_for(f"fsdp_custom:checkpoint={form}", devices, max_steps=2)
    trainer.fit(DeepTied("adamw"), loader(devices))
    trainer.save_checkpoint(path)


@pytest.fixture
def forms(ranks: Any, tmp_path: Path) -> tuple[Path, Path]:
    """The same checkpoint in both forms, of two ranks."""
    for form in ("whole", "sharded"):
        ranks(2).run(trained, tmp_path / f"{form}.ckpt", form, 2)
    return tmp_path / "whole.ckpt", tmp_path / "sharded.ckpt"


def test_the_same_is_said_and_exported(
    forms: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reports = []
    for path in forms:
        assert inspect([str(path), "--json"]) == 0
        reports.append(json.loads(capsys.readouterr().out))
    of_file, of_folder = reports
    assert (of_file["form"], of_folder["form"]) == ("whole file", "folder of 5 files")
    for key in ("epoch", "global_step", "optimizers", "totals", "tied", "tensors", "loops"):
        assert of_folder[key] == of_file[key], key
    assert of_folder["tied"] == [["model.tokens.weight", "model.head.weight"]]
    assert of_folder["versions"]["torch"]
    assert inspect([str(forms[1])]) == 0
    assert "by MeshStrategy(shard=2)" in capsys.readouterr().out
    for to, out in (("torch", "a.pt"), ("lightning", "a.ckpt"), ("safetensors", "folder")):
        for path in forms:
            assert export([str(path), "--to", to, "--out", str(tmp_path / path.stem / out)]) == 0
    found = [torch.load(tmp_path / form / "a.pt") for form in ("whole", "sharded")]
    assert is_equal(found[1], found[0])
    assert found[1]["model.head.weight"].data_ptr() == found[1]["model.tokens.weight"].data_ptr()
    found = [torch.load(tmp_path / form / "a.ckpt")["state_dict"] for form in ("whole", "sharded")]
    assert is_equal(found[1], found[0])
    contents = [(tmp_path / form / "folder" / "model.safetensors").read_bytes() for form in ("whole", "sharded")]
    assert contents[0] == contents[1]


def test_a_damaged_one(forms: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (forms[1] / "__1_0.distcp").unlink()
    assert inspect([str(forms[1])]) == 2
    assert "damaged: its file __1_0.distcp is missing" in capsys.readouterr().out
    with pytest.raises(CheckpointError, match=r"its file __1_0\.distcp is missing"):
        export([str(forms[1]), "--to", "torch", "--out", str(tmp_path / "a.pt")])
    assert not (tmp_path / "a.pt").exists()

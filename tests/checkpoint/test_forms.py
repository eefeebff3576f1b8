"""Checkpoints of both forms, written under any strategy and number of ranks and read under any other.

Each source is read under two other strategies; ``PAIRS=all`` reads every one under every other, in both forms.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_parallel.checkpoint.sharded_folder import damage_of_folder, open_folder, read_manifest
from tests.jobs.checkpoints import equal_contents, resumed, saved

RUNS = [
    ("ddp_custom", 1),
    ("fsdp_custom", 2),
    ("hsdp_custom", 4),
    ("ddp_custom", 2),
    ("pp_custom", 2),
    ("zero1_custom", 2),
    ("fsdp_tp_custom", 4),
    ("zero2_custom", 2),
    ("fsdp_custom:tensor=2,pipeline=2", 4),
    ("cp_custom", 2),
    ("fsdp_custom", 4),
    ("fsdp_custom:context=2,pipeline=2", 4),
    ("tp_custom", 2),
    ("fsdp_offload_custom", 1),
]
"""Strategies and numbers of ranks."""
SAME = 1e-6
ALL = os.environ.get("PAIRS") == "all"


def read(path: Path) -> dict[str, Any]:
    """A checkpoint of either form, without the random states of ranks, which hooks of the fits draw from."""
    if path.is_dir():
        assert damage_of_folder(path) == ""
        checkpoint = open_folder(path, lambda rest: torch.load(rest, weights_only=True))
    else:
        checkpoint = torch.load(path, weights_only=True)
    return {key: value for key, value in checkpoint.items() if key != "lightning_parallel"}


def job(ranks: Any, function: Any, strategy: str, size: int, *args: Any) -> list[float]:
    losses: list[float] = ranks(size).run(function, strategy, size, *args)[0]
    return losses


def _with(strategy: str, form: str) -> str:
    return f"{strategy}{',' if ':' in strategy else ':'}checkpoint={form}"


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], Path]:
    """Plain Lightning in one process: its losses, and its checkpoints."""
    path = tmp_path_factory.mktemp("reference") / "a.ckpt"
    return saved("auto", 1, str(path)), path


@pytest.mark.parametrize("form", ["sharded", *(["whole"] if ALL else [])])
@pytest.mark.parametrize("number", range(len(RUNS)))
def test_any_strategy_reads_what_any_other_wrote(
    ranks: Any, tmp_path: Path, reference: tuple[list[float], Path], number: int, form: str
) -> None:
    losses, plain = reference
    source, size = RUNS[number]
    path = tmp_path / "a.ckpt"
    assert job(ranks, saved, _with(source, form), size, str(path)) == pytest.approx(losses, abs=SAME)
    assert path.is_dir() == (form == "sharded")
    for own, expected in ((path, plain), (Path(f"{path}.end"), Path(f"{plain}.end"))):
        ours, theirs = read(own), read(expected)
        assert equal_contents(ours, theirs) <= SAME
        assert list(ours["state_dict"]) == list(theirs["state_dict"])
        assert ours["state_dict"]._metadata == theirs["state_dict"]._metadata
    readers = RUNS if ALL else [RUNS[(number + shift) % len(RUNS)] for shift in (3, 8)]
    for reader, its_size in readers:
        end = tmp_path / "end.ckpt"
        found = job(
            ranks, resumed, f"{reader}{',' if ':' in reader else ':'}checkpoint=whole", its_size, str(path), str(end)
        )
        assert found == pytest.approx(losses[len(losses) // 2 :], abs=SAME), reader
        ours, theirs = read(end), read(Path(f"{plain}.end"))
        for key in ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "epoch"):
            assert equal_contents(ours[key], theirs[key]) <= SAME, (reader, key)
        end.unlink()


def test_the_manifest(ranks: Any, tmp_path: Path) -> None:
    job(ranks, saved, "fsdp_custom:checkpoint=sharded", 2, str(tmp_path / "a.ckpt"))
    manifest = read_manifest(tmp_path / "a.ckpt")
    assert manifest["degrees"]["shard"] == 2
    assert manifest["dtypes"] == ["torch.float32"]
    assert manifest["versions"]["torch"] == torch.__version__.partition("+")[0] or torch.__version__
    assert manifest["plan"]["structure"]
    assert manifest["global_step"] == 3
    assert {"__0_0.distcp", "__1_0.distcp", "rest.pt", ".metadata"} == set(manifest["files"])
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a.ckpt", "a.ckpt.end"]

"""A checkpoint that is opened: nothing of its tensors is read, and nothing is run that it names."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_parallel import CheckpointError
from lightning_parallel.checkpoint.opened import damage_in, entries_of, open_checkpoint
from tests.jobs.exports import ReadAnew

RAN: list[str] = []


def note(text: str) -> None:
    RAN.append(text)


class Trap:
    """Says that it was unpickled."""

    def __reduce__(self) -> Any:
        return note, ("run",)


class Gone:
    """A class that is not where the checkpoint is opened."""


def mapped(path: Path) -> int:
    """Kilobytes of `path` that are in this process's memory."""
    number, is_here = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        fields = line.split()
        if not fields[0].endswith(":"):
            is_here = line.endswith(str(path))
        elif is_here and fields[0] == "Rss:":
            number += int(fields[1])
    return number


def test_tensors_stay_on_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    weight = torch.arange(4_000_000.0)
    torch.save({"state_dict": {"weight": weight, "again": weight}, "epoch": 3}, path)
    checkpoint = open_checkpoint(path)
    entries = entries_of(checkpoint["state_dict"])
    assert [(each.name, each.shape, each.tied_to) for each in entries] == [
        ("weight", (4_000_000,), ""), ("again", (4_000_000,), "weight")
    ]  # fmt: skip
    assert mapped(path) < 1_000
    assert torch.equal(checkpoint["state_dict"]["weight"], weight)
    assert mapped(path) > 15_000
    assert checkpoint["epoch"] == 3


def test_what_has_to_be_trusted_is_named_and_not_run(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    torch.save({"state_dict": {"weight": torch.ones(2)}, "hyper_parameters": {"trap": Trap()}}, path)
    for is_old in (False, True):
        if is_old:
            value = {"state_dict": {"weight": torch.ones(2)}, "trap": Trap()}
            torch.save(value, path, _use_new_zipfile_serialization=False)
        RAN.clear()
        with pytest.raises(CheckpointError, match=r"objects of [\w.]+.*give --unsafe") as error:
            open_checkpoint(path)
        assert RAN == []
        assert "\n" not in str(error.value)
        assert torch.equal(open_checkpoint(path, unsafe=True)["state_dict"]["weight"], torch.ones(2))
        assert RAN == ["run"]


def test_a_class_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.ckpt"
    torch.save({"state_dict": {}, "gone": Gone()}, path)
    monkeypatch.delattr(sys.modules[__name__], "Gone")
    with pytest.raises(CheckpointError, match=r"cannot be imported here .*Gone"):
        open_checkpoint(path, unsafe=True)


def test_a_plain_state_dict_and_the_old_format(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save({"weight": torch.ones(2)}, path)
    assert list(open_checkpoint(path)["state_dict"]) == ["weight"]
    torch.save({"weight": torch.ones(2)}, path, _use_new_zipfile_serialization=False)
    assert torch.equal(open_checkpoint(path)["state_dict"]["weight"], torch.ones(2))


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    with pytest.raises(CheckpointError, match="there is no file"):
        open_checkpoint(path)
    torch.save({"model": 3, "step": 2}, path)
    with pytest.raises(CheckpointError, match="it holds the keys model, step, and no state_dict"):
        open_checkpoint(path)
    with pytest.raises(CheckpointError, match=f"is a folder.*{path}"):
        damage_in(tmp_path)
    path.write_bytes(b"not a checkpoint")
    assert "begins with" in damage_in(path)
    with pytest.raises(CheckpointError, match=r"cannot be read by torch\.load"):
        open_checkpoint(path)


def test_tensors_that_are_read_anew_are_not_taken_for_tied() -> None:
    """The memory of one that is gone may be that of the next."""
    weights = ReadAnew({f"weight{index}": torch.ones(1000) for index in range(20)})
    entries = entries_of(weights)
    assert [each.name for each in entries] == list(weights)
    assert not any(each.tied_to or each.is_held for each in entries)
    assert weights.most_alive <= 3


def test_views_and_what_has_no_storage() -> None:
    whole = torch.arange(10.0)
    weights: Any = {
        "whole": whole, "part": whole[:5], "other": whole[5:], "same": whole[:5], "empty": torch.ones(0),
        "sparse": torch.eye(3).to_sparse(), "extra": {"a": 1}, "none": torch.ones(0),
    }  # fmt: skip
    entries = entries_of(weights)
    assert {each.name: each.tied_to for each in entries if each.tied_to} == {"same": "part"}
    assert [each.name for each in entries] == [name for name in weights if name != "extra"]

"""A folder of a checkpoint: there whole or not at all, and looked at before it is read."""

from __future__ import annotations

import gc
import io
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from lightning_parallel import CheckpointError
from lightning_parallel.checkpoint.folder_writer import FolderWriter, bytes_of_plan, contents_of
from lightning_parallel.checkpoint.opened import open_checkpoint
from lightning_parallel.checkpoint.sharded_folder import (
    MANIFEST,
    damage_of_folder,
    manifest_text,
    open_folder,
    read_manifest,
)
from lightning_parallel.checkpoint.stored_tensors import StoredFolder, _Unpickler
from lightning_parallel.checkpoint.whole_file import damage_of, remove_partial
from lightning_parallel.checkpoint.whole_folder import partial_folder
from lightning_parallel.strategies.checkpoint_files import readable

ROOT = Path(__file__).parents[2]
WEIGHT = torch.arange(100_000.0)


def checkpoint_of(weight: torch.Tensor = WEIGHT) -> dict[str, Any]:
    state = {0: {"exp_avg": weight + 1, "step": torch.tensor(3.0), "kind": "slow"}}
    return {
        "epoch": 3,
        "state_dict": {"weight": weight, "tied": weight, "extra": {"a": 1}},
        "optimizer_states": [{"state": state, "param_groups": [{"lr": 0.1, "params": [0]}]}],
    }


def write(path: Path, checkpoint: dict[str, Any] | None = None) -> None:
    """Write a folder as one rank does."""
    contents = contents_of(checkpoint or checkpoint_of(), {"tied": "weight"}, lambda name: True)
    writer = FolderWriter(contents, 0)
    writer.add_values(contents.values)
    with partial_folder(path, contents.num_bytes) as partial:
        (plan,) = writer.arrange([writer.plan])
        writer.finish(path, partial, [writer.write(partial, plan)], {"versions": {"lightning_parallel": "9"}})


def read(path: Path) -> dict[str, Any]:
    return open_folder(path, lambda rest: torch.load(rest, weights_only=True))


def is_value(path: Path) -> bool:
    return damage_of_folder(path) == "" and torch.equal(read(path)["state_dict"]["weight"], WEIGHT)


def names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


def test_what_is_written_is_read(tmp_path: Path) -> None:
    write(tmp_path / "new" / "a.ckpt")
    found = read(tmp_path / "new" / "a.ckpt")
    assert names(tmp_path / "new") == ["a.ckpt"]
    assert list(found["state_dict"]) == ["weight", "tied", "extra"]
    assert torch.equal(found["state_dict"]["tied"], WEIGHT)
    assert found["state_dict"]["extra"] == {"a": 1}
    (optimizer,) = found["optimizer_states"]
    assert dict(optimizer["state"][0]) == {"exp_avg": mock.ANY, "step": torch.tensor(3.0), "kind": "slow"}
    assert torch.equal(optimizer["state"][0]["exp_avg"], WEIGHT + 1)
    assert optimizer["param_groups"] == [{"lr": 0.1, "params": [0]}]
    stored = sum(each.stat().st_size for each in (tmp_path / "new" / "a.ckpt").glob("*.distcp"))
    assert 2 * WEIGHT.nbytes < stored < 3 * WEIGHT.nbytes  # what is tied is there once


def test_equal_tensors_of_two_ranks_are_written_once() -> None:
    writers = [
        FolderWriter(contents_of(checkpoint_of(), {"tied": "weight"}, lambda name: True), rank) for rank in (0, 1)
    ]
    plans = writers[0].arrange([writer.plan for writer in writers])
    assert sum(map(bytes_of_plan, plans)) == 2 * WEIGHT.nbytes + 4


def test_hooks_may_change_what_is_read(tmp_path: Path) -> None:
    write(tmp_path / "a.ckpt")
    weights = read(tmp_path / "a.ckpt")["state_dict"]
    del weights["extra"]
    weights["weight"] = torch.zeros(2)
    weights["other"] = weights.pop("tied")
    assert {name: tuple(weights[name].shape) for name in weights} == {"weight": (2,), "other": (100_000,)}


def test_a_folder_takes_the_place_of_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    path.write_bytes(b"a file")
    write(path, checkpoint_of(torch.zeros(3)))
    assert not is_value(path)
    write(path)
    assert is_value(path)
    with mock.patch("ctypes.CDLL", return_value=object()):  # a system that cannot let two folders change places
        write(path, checkpoint_of(torch.zeros(3)))
        write(path)
    assert is_value(path)
    assert names(tmp_path) == ["a.ckpt"]


def _cut(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def _of_later_format(path: Path) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 3}))


def _rename_a_tied(path: Path) -> None:
    path.write_text(path.read_text().replace('"tied": "weight"', '"tied": "weighs"'))


DAMAGES: list[tuple[str, Callable[[Path], Any], str]] = [
    ("__0_0.distcp", _flip, "what __0_0.distcp holds differs from its checksum"),
    ("__0_0.distcp", _cut, "its file __0_0.distcp has 40"),
    ("__0_0.distcp", Path.unlink, "its file __0_0.distcp is missing"),
    (".metadata", _flip, "what .metadata holds differs from its checksum"),
    ("rest.pt", _cut, "its file rest.pt has "),
    ("manifest.json", _cut, "its manifest.json cannot be read ("),
    ("manifest.json", _rename_a_tied, "its manifest.json differs from its checksum"),
    ("manifest.json", lambda path: path.write_text("[]"), "its manifest.json is none of a checkpoint"),
    ("manifest.json", lambda path: path.write_text('{"format": 1, "files": {}}'), "its manifest.json lacks tied"),
    ("manifest.json", Path.unlink, "its manifest.json cannot be read ([Errno 2] No such file"),
]


@pytest.mark.parametrize(("name", "damage", "words"), DAMAGES)
def test_damage_is_named(tmp_path: Path, name: str, damage: Callable[[Path], Any], words: str) -> None:
    for number, folder in enumerate(("before", "last", "other")):
        write(tmp_path / f"{folder}.ckpt")
        os.utime(tmp_path / f"{folder}.ckpt", (number, number))
    damage(tmp_path / "last.ckpt" / name)
    assert damage_of_folder(tmp_path / "last.ckpt").startswith(words)
    chosen, said = readable(tmp_path / "last.ckpt")
    assert chosen == tmp_path / "other.ckpt"
    assert f"last.ckpt is damaged: {words}" in said
    damage(tmp_path / "other.ckpt" / name)
    with pytest.raises(CheckpointError, match=r"other\.ckpt is damaged: .*give ckpt_path=.*before\.ckpt"):
        readable(tmp_path / "other.ckpt")


def test_a_later_format_is_no_damage_that_another_version_has(tmp_path: Path) -> None:
    write(tmp_path / "a.ckpt")
    _of_later_format(tmp_path / "a.ckpt" / "manifest.json")
    with pytest.raises(CheckpointError, match=r"has the format 3, where 1 and 2 are read; .*'lightning_parallel': '9'"):
        read_manifest(tmp_path / "a.ckpt")


def test_a_folder_of_the_format_before_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    write(path)
    expected = dict(open_checkpoint(path)["state_dict"])
    before = {key: value for key, value in json.loads((path / MANIFEST).read_text()).items() if key != "sha256"}
    (path / MANIFEST).write_text(manifest_text({**before, "format": 1}))
    assert damage_of_folder(path) == ""
    found = open_checkpoint(path)["state_dict"]
    assert list(expected) == list(found)
    assert torch.equal(found["weight"], expected["weight"])


def test_a_file_that_the_disk_does_not_give(tmp_path: Path) -> None:
    write(tmp_path / "before.ckpt")
    write(tmp_path / "last.ckpt")
    (tmp_path / "last.ckpt" / "rest.pt").unlink()
    (tmp_path / "last.ckpt" / "rest.pt").symlink_to("/proc/self/mem")  # which ends in an error of the disk
    manifest = json.loads((tmp_path / "last.ckpt" / "manifest.json").read_text())
    del manifest["sha256"]  # as of earlier versions
    manifest["files"]["rest.pt"]["bytes"] = 0
    (tmp_path / "last.ckpt" / "manifest.json").write_text(json.dumps(manifest))
    assert damage_of_folder(tmp_path / "last.ckpt") == "its file rest.pt cannot be read ([Errno 5] Input/output error)"
    assert readable(tmp_path / "last.ckpt")[0] == tmp_path / "before.ckpt"
    assert damage_of(Path("/proc/self/mem")) == "it cannot be read ([Errno 5] Input/output error)"


def test_files_are_looked_at_in_shares(tmp_path: Path) -> None:
    write(tmp_path / "a.ckpt")
    _flip(tmp_path / "a.ckpt" / "rest.pt")
    found = [damage_of_folder(tmp_path / "a.ckpt", (rank, 3)) for rank in range(3)]
    assert sorted(map(bool, found)) == [False, False, True]


class Runs:
    def __reduce__(self) -> Any:
        return os.system, ("true",)


def test_the_description_of_tensors_runs_no_code(tmp_path: Path) -> None:
    write(tmp_path / "a.ckpt")
    (tmp_path / "a.ckpt" / ".metadata").write_bytes(pickle.dumps(Runs()))
    with pytest.raises(pickle.UnpicklingError, match="system does not belong there"):
        StoredFolder(tmp_path / "a.ckpt")


@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])
def test_paths_are_read_as_any_python_writes_them(module: str) -> None:
    """Python 3.13 has their classes in another module."""
    written = f"c{module}\nPosixPath\n(Vfile\ntR.".encode()
    assert _Unpickler(io.BytesIO(written)).load() == Path("file")


KILLED = """
import sys
from pathlib import Path
import torch
from tests.checkpoint.test_sharded_folder import checkpoint_of, write
print("ready", flush=True)
while True:
    write(Path(sys.argv[1]), {**checkpoint_of(), "big": torch.zeros(20_000_000)})
"""


@pytest.mark.slow
def test_a_kill_leaves_the_folder_before(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    write(path)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    is_partial = []
    for after in (0.01, 0.1, 0.2, 0.33):
        command = [sys.executable, "-c", KILLED, str(path)]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(after)
            process.send_signal(signal.SIGKILL)
            process.wait(60)
        assert is_value(path)
        is_partial.append(len(names(tmp_path)) > 1)
    assert any(is_partial)
    write(path)
    assert names(tmp_path) == ["a.ckpt"]


def test_the_folder_of_a_writer_at_work_is_not_removed(tmp_path: Path) -> None:
    with partial_folder(tmp_path / "a.ckpt", 1) as partial:
        remove_partial(tmp_path)
        assert partial.exists()
    assert names(tmp_path) == []


# In Python 3.13, a file of torch's that could not be written says so once more when it is collected.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_disk_that_is_too_small(small_disk: Path) -> None:
    write(small_disk / "a.ckpt", checkpoint_of(WEIGHT[:10_000]))
    with pytest.raises(OSError, match="No space left on device"):
        write(small_disk / "a.ckpt", checkpoint_of(torch.zeros(200_000)))
    unlimited = mock.Mock(free=2**40)
    with mock.patch("shutil.disk_usage", return_value=unlimited), pytest.raises(OSError, match="No space left"):
        write(small_disk / "a.ckpt", checkpoint_of(torch.zeros(200_000)))
    assert names(small_disk) == ["a.ckpt"]
    assert torch.equal(read(small_disk / "a.ckpt")["state_dict"]["weight"], WEIGHT[:10_000])
    gc.collect()  # here, and not in a later test

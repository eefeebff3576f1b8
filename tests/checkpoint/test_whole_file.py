"""A file of a checkpoint: there whole or not at all, and looked at before it is read."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import torch

from lightning_parallel import CheckpointError
from lightning_parallel.checkpoint import whole_file
from lightning_parallel.checkpoint.whole_file import bytes_of_tensors, damage_of, remove_partial, write_whole

ROOT = Path(__file__).parents[2]
VALUE = {"state_dict": {"weight": torch.arange(100_000.0)}, "epoch": 3}


def names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


def is_value(path: Path) -> bool:
    return torch.equal(torch.load(path)["state_dict"]["weight"], VALUE["state_dict"]["weight"])  # type: ignore[index]


def test_it_is_a_file_of_torch(tmp_path: Path) -> None:
    write_whole(VALUE, tmp_path / "new" / "a.ckpt")
    assert is_value(tmp_path / "new" / "a.ckpt")
    assert names(tmp_path / "new") == ["a.ckpt"]
    other = tmp_path / "other"
    other.touch()
    assert (tmp_path / "new" / "a.ckpt").stat().st_mode == other.stat().st_mode


def test_bytes_of_tensors_that_share_memory_count_once() -> None:
    tensor = torch.zeros(10)
    assert bytes_of_tensors({"a": tensor, "b": [tensor[2:], (torch.zeros(3), 5)]}) == 40 + 12


KILLED = """
import sys
from pathlib import Path
import torch
from lightning_parallel.checkpoint.whole_file import write_whole
value = {"state_dict": {"weight": torch.arange(100_000.0)}, "big": torch.zeros(30_000_000)}
print("ready", flush=True)
while True:
    write_whole(value, Path(sys.argv[1]))
    print("written", flush=True)
"""


@pytest.mark.slow
def test_a_kill_leaves_the_file_before(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    write_whole(VALUE, path)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    is_partial = []
    for after in (0.01, 0.03, 0.05, 0.08, 0.13):
        command = [sys.executable, "-c", KILLED, str(path)]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(after)
            process.send_signal(signal.SIGKILL)
            process.wait(60)
        assert is_value(path)
        assert damage_of(path) == ""
        is_partial.append(len(names(tmp_path)) > 1)
    assert any(is_partial)
    write_whole(VALUE, path)
    assert names(tmp_path) == ["a.ckpt"]


def test_the_file_of_a_writer_at_work_is_not_removed(tmp_path: Path) -> None:
    partial, file = whole_file._open_partial(tmp_path)
    remove_partial(tmp_path)
    assert partial.exists()
    file.close()
    remove_partial(tmp_path)
    assert names(tmp_path) == []


def test_a_disk_that_is_too_small(small_disk: Path) -> None:
    write_whole(VALUE, small_disk / "a.ckpt")
    with pytest.raises(CheckpointError, match=r"No space left on device\. Its tensors take 8,000,000 bytes, and 6"):
        write_whole(torch.zeros(2_000_000), small_disk / "a.ckpt")
    assert is_value(small_disk / "a.ckpt")


def test_a_disk_that_becomes_full(small_disk: Path) -> None:
    """Others write too, or what is free was not told rightly."""
    write_whole(VALUE, small_disk / "a.ckpt")
    unlimited = mock.Mock(free=2**40)
    with mock.patch("shutil.disk_usage", return_value=unlimited), pytest.raises(CheckpointError, match="No space left"):
        write_whole(torch.zeros(2_000_000), small_disk / "a.ckpt")
    assert names(small_disk) == ["a.ckpt"]
    assert is_value(small_disk / "a.ckpt")


LIMITED = """
import resource, signal, sys
from pathlib import Path
import torch
from lightning_parallel import CheckpointError
from lightning_parallel.checkpoint.whole_file import write_whole
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
try:
    write_whole(torch.zeros(2_000_000), Path(sys.argv[1]))
except CheckpointError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_limit_that_free_space_does_not_show(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", LIMITED, str(tmp_path / "a.ckpt")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert "could not be written: File too large. Its tensors take 8,000,000 bytes" in done.stdout
    assert names(tmp_path) == []


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"file/a.ckpt could not be written: (Not a directory|File exists)"):
        write_whole(VALUE, tmp_path / "file" / "a.ckpt")


def test_a_folder_that_is_read_only(tmp_path: Path) -> None:
    refused = PermissionError(errno.EACCES, os.strerror(errno.EACCES))  # root would not be refused
    with (
        mock.patch.object(Path, "open", side_effect=refused),
        pytest.raises(CheckpointError, match="Permission denied"),
    ):
        write_whole(VALUE, tmp_path / "a.ckpt")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: data[: len(data) // 2], "its end is missing or damaged"),
        (lambda data: data[:200_000] + bytes([data[200_000] ^ 4]) + data[200_001:], "differs from its checksum"),
        (lambda data: b"", "it is empty"),
        (lambda data: b"<html>not found</html>", "it begins with b'<htm'"),
        (lambda data: data, ""),
    ],
)
def test_damage_is_seen(change: object, words: str, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    write_whole(VALUE, path)
    path.write_bytes(change(path.read_bytes()))  # type: ignore[operator]
    assert words in damage_of(path)
    assert bool(words) == bool(damage_of(path))


def test_files_of_old_are_read_without(tmp_path: Path) -> None:
    torch.save(VALUE, tmp_path / "old.ckpt", _use_new_zipfile_serialization=False)
    assert damage_of(tmp_path / "old.ckpt") == ""

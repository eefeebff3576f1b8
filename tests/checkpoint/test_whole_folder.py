"""A folder that is there whole or not at all."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from lightning_parallel.checkpoint import places
from lightning_parallel.checkpoint.whole_folder import folder_aside


def names(folder: Path) -> list[str]:
    return sorted(each.relative_to(folder).as_posix() for each in folder.rglob("*"))


def fill(path: Path, text: str, num_bytes: int = 0) -> None:
    with folder_aside(path, num_bytes) as folder:
        (folder / text).write_text(text)


def test_it_is_there_at_the_end_and_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "new" / "out"
    with folder_aside(path, 0) as folder:
        (folder / "one").write_text("1")
        assert not path.exists()
    assert names(tmp_path) == ["new", "new/out", "new/out/one"]
    fill(path, "two")
    assert names(tmp_path) == ["new", "new/out", "new/out/two"]


def test_after_an_error_it_is_what_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out"
    fill(path, "one")
    with pytest.raises(IsADirectoryError):
        fill(path, ".")
    assert names(tmp_path) == ["out", "out/one"]
    with pytest.raises(OSError, match="No space left"):
        fill(path, "two", 2**62)
    rename = Path.rename

    def fail(self: Path, target: Path) -> Path:
        if self.stem.endswith("-new"):
            raise OSError("not now")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    monkeypatch.setattr(places, "_exchange", lambda partial, path: False)
    with pytest.raises(OSError, match="not now"):
        fill(path, "two")
    assert names(tmp_path) == ["out", "out/one"]


def test_what_a_killed_writer_has_left_is_removed(tmp_path: Path) -> None:
    """But not what another is writing, which holds a lock, nor what has another name."""
    for name in (".lightning_parallel-a.partial", ".lightning_parallel-b.partial", "mine.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "part").touch()
    descriptor = os.open(tmp_path / ".lightning_parallel-b.partial", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    fill(tmp_path / "out", "one")
    os.close(descriptor)
    found = {name.partition("/")[0] for name in names(tmp_path)}
    assert found == {".lightning_parallel-b.partial", "mine.partial", "out"}


def test_a_link_stays(tmp_path: Path) -> None:
    fill(tmp_path / "real", "one")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    fill(tmp_path / "link", "two")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "two").exists()

"""What is written gets its name at once, whatever has that name, and whoever else writes there."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from lightning_parallel.checkpoint import places
from lightning_parallel.checkpoint.places import check_place, put
from lightning_parallel.checkpoint.whole_folder import partial_folder

KINDS = ["file", "folder", "link", "link to nothing", "nothing"]


def names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


def make(path: Path, kind: str, text: str = "old") -> None:
    if kind == "file":
        path.write_text(text)
    elif kind == "folder":
        path.mkdir()
        (path / "part").write_text(text)
    elif kind.startswith("link"):
        path.symlink_to("real" if kind == "link" else "gone")


def text_of(path: Path) -> str:
    return (path / "part" if path.is_dir() else path).read_text()


@pytest.mark.parametrize("exchanges", [True, False])
@pytest.mark.parametrize("there", KINDS)
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_either_kind_takes_the_place_of_either(
    kind: str, there: str, exchanges: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchanges:
        monkeypatch.setattr(places, "_exchange", lambda partial, path: False)
    make(tmp_path / "real", "folder")
    make(tmp_path / "a.ckpt", there)
    make(tmp_path / ".x.partial", kind, "new")
    put(tmp_path / ".x.partial", tmp_path / "a.ckpt")
    assert names(tmp_path) == ["a.ckpt", "real"]
    assert not (tmp_path / "a.ckpt").is_symlink()
    assert text_of(tmp_path / "a.ckpt") == "new"
    assert text_of(tmp_path / "real") == "old"


def test_a_kill_between_two_renames_leaves_what_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where names cannot change places: an exception cannot tell what a kill would, so that renames are followed."""
    monkeypatch.setattr(places, "_exchange", lambda partial, path: False)
    rename, seen = Path.rename, list[list[str]]()

    def noting(self: Path, target: Path) -> Path:
        result = rename(self, target)
        seen.append([name for name in names(tmp_path) if not name.startswith(".")])
        return result

    monkeypatch.setattr(Path, "rename", noting)
    make(tmp_path / "last.ckpt", "folder")
    make(tmp_path / ".x.partial", "folder", "new")
    put(tmp_path / ".x.partial", tmp_path / "last.ckpt")
    assert seen == [["last-new.ckpt", "last.ckpt"], ["last-new.ckpt"], ["last.ckpt"]]


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    make(tmp_path / "mine", "folder")
    with pytest.raises(OSError, match="Directory not empty"):
        check_place(tmp_path / "mine", is_checkpoint=False)
    check_place(tmp_path / "mine", is_checkpoint=True)
    (tmp_path / "empty").mkdir()
    check_place(tmp_path / "empty", is_checkpoint=False)


def test_writers_beside_each_other(tmp_path: Path) -> None:
    """Each clears away what others have left; what they have just made is not locked yet."""
    problems = list[str]()

    def write(number: int) -> None:
        try:
            for _ in range(60):
                with partial_folder(tmp_path / f"{number % 2}.ckpt", 1) as partial:
                    (partial / "part").write_text("new")
                    put(partial, tmp_path / f"{number % 2}.ckpt")
        except OSError as error:
            problems.append(str(error))

    threads = [threading.Thread(target=write, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert names(tmp_path) == ["0.ckpt", "1.ckpt"]

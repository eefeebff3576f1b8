"""A damaged checkpoint is named, once, and the one before is offered; ``ckpt_path="last"`` takes it."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_parallel import CheckpointError
from tests.data import loader
from tests.models.pipelined import DeepTied
from tests.parity import trainer_for

DAMAGES: dict[str, Any] = {
    "truncated": lambda data: data[: len(data) // 2],
    "flipped": lambda data: data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :],
    "garbage": lambda data: b"\x00" * 100,
}


def trainer_of(strategy: str, num_ranks: int, folder: Path, steps: int) -> Any:
    callback = ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1, save_last=True)
    return trainer_for(strategy, num_ranks, callbacks=[callback], enable_checkpointing=True, max_steps=steps)


def written(folder: Path, damage: str, *names: str) -> None:
    """Checkpoints of updates 2 and 4, of which `names` are damaged."""
    trainer_of("auto", 1, folder, 4).fit(DeepTied(), loader(1, 8))
    for name in names:
        path = folder / name
        path.write_bytes(DAMAGES[damage](path.read_bytes()))
    for age, name in enumerate(("last.ckpt", "epoch=0-step=4.ckpt", "epoch=0-step=2.ckpt")):
        os.utime(folder / name, (1e9 - age, 1e9 - age))


def resumed(strategy: str, folder: Path, ckpt_path: str) -> tuple[int, list[str]]:
    """Updates of the run that goes on, and what is said; a rank's error in place of these."""
    steps: list[int] = []

    class Looks(DeepTied):
        def on_train_start(self) -> None:
            steps.append(self.global_step)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer_of(strategy, 2, folder, 6).fit(Looks(), loader(2, 8), ckpt_path=ckpt_path)
        except CheckpointError as error:
            return -1, [str(error)]
    return steps[0], [str(each.message) for each in caught if "damaged" in str(each.message)]


@pytest.mark.parametrize("damage", DAMAGES)
def test_last_walks_back(damage: str, ranks: Any, tmp_path: Path) -> None:
    written(tmp_path, damage, "last.ckpt", "epoch=0-step=4.ckpt")
    (step, said), (other, by_other) = ranks(2).run(resumed, "fsdp_custom", tmp_path, "last")
    assert (step, other, by_other) == (2, 2, [])
    assert len(said) == 1
    assert "last.ckpt is damaged: " in said[0]
    assert "Read instead: " in said[0]
    assert "step=2.ckpt" in said[0]


@pytest.mark.parametrize("name", ["ddp_custom", "pp_custom"])
def test_another_is_named_and_one_offered(name: str, ranks: Any, tmp_path: Path) -> None:
    written(tmp_path, "flipped", "epoch=0-step=4.ckpt")
    path = str(tmp_path / "epoch=0-step=4.ckpt")
    for step, (said,) in ranks(2).run(resumed, name, tmp_path, path):
        assert step == -1
        assert f"the checkpoint {path} is damaged: what it says of " in said
        assert f"give ckpt_path={tmp_path / 'last.ckpt'}" in said


def test_none_is_intact(ranks: Any, tmp_path: Path) -> None:
    written(tmp_path, "truncated", "last.ckpt", "epoch=0-step=4.ckpt", "epoch=0-step=2.ckpt")
    for step, (said,) in ranks(2).run(resumed, "ddp_custom", tmp_path, "last"):
        assert step == -1
        assert "None beside it is intact" in said


# Folders of sharded checkpoints -------------------------------------------------------------------------------------


def write_folders(folder: Path) -> None:
    """Folders of updates 2 and 4, by two ranks."""
    trainer_of("fsdp_custom:checkpoint=sharded", 2, folder, 4).fit(DeepTied(), loader(2, 8))


def damage_folder(path: Path, kind: str) -> None:
    """Damage what rank 1 has written: its file is gone, or one bit of it is another."""
    file = path / "__1_0.distcp"
    if kind == "missing":
        file.unlink()
    else:
        file.write_bytes(DAMAGES["flipped"](file.read_bytes()))


def dated(folder: Path, *names: str) -> None:
    for age, name in enumerate(names):
        os.utime(folder / name, (1e9 - age, 1e9 - age))


@pytest.mark.parametrize("kind", ["missing", "flipped"])
def test_the_last_folder_walks_back(kind: str, ranks: Any, tmp_path: Path) -> None:
    ranks(2).run(write_folders, tmp_path)
    assert (tmp_path / "last.ckpt").is_dir()
    for name in ("last.ckpt", "epoch=0-step=4.ckpt"):
        damage_folder(tmp_path / name, kind)
    dated(tmp_path, "last.ckpt", "epoch=0-step=4.ckpt", "epoch=0-step=2.ckpt")
    (step, said), (other, by_other) = ranks(2).run(resumed, "fsdp_custom", tmp_path, "last")
    assert (step, other, by_other) == (2, 2, [])
    assert len(said) == 1
    words = "its file __1_0.distcp is missing" if kind == "missing" else "what __1_0.distcp holds differs from its chec"
    assert words in said[0]
    assert "step=2.ckpt" in said[0]


@pytest.mark.parametrize("name", ["ddp_custom", "pp_custom"])
def test_a_damaged_folder_ends_all_ranks(name: str, ranks: Any, tmp_path: Path) -> None:
    ranks(2).run(write_folders, tmp_path)
    path = tmp_path / "epoch=0-step=4.ckpt"
    damage_folder(path, "flipped")
    for step, (said,) in ranks(2).run(resumed, name, tmp_path, str(path)):
        assert step == -1
        assert f"the checkpoint {path} is damaged: what __1_0.distcp holds" in said
        assert "give ckpt_path=" in said

"""A checkpoint that rank 0 cannot write is one error on every rank, or a warning."""

from __future__ import annotations

import errno
import os
import time
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import fsspec
import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO

from lightning_parallel import CheckpointError, ConfigurationError, full_state_dict
from lightning_parallel.checkpoint.folder_writer import FolderWriter
from lightning_parallel.checkpoint.sharded_folder import open_folder
from tests.data import loader
from tests.models.pipelined import DeepTied
from tests.names import num_readers
from tests.parity import trainer_for

NAMES = ["ddp_custom", "fsdp_custom", "pp_custom"]


def fit(strategy: str, folder: Path, **kwargs: Any) -> tuple[int, str, float]:
    """Updates, the error, and the seconds that the fit took."""
    callback = ModelCheckpoint(folder, every_n_train_steps=2)
    trainer = trainer_for(strategy, 2, callbacks=[callback], enable_checkpointing=True, **kwargs)
    began, words = time.monotonic(), ""
    try:
        trainer.fit(DeepTied(), loader(num_readers(strategy.partition(":")[0], 2)))
    except CheckpointError as error:
        words = str(error)
    return trainer.global_step, words, time.monotonic() - began


FORMS = ["checkpoint=whole", "checkpoint=sharded"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", NAMES)
def test_all_ranks_have_one_error(name: str, form: str, ranks: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for step, words, seconds in ranks(2).run(fit, f"{name}:{form}", tmp_path / "file" / "folder"):
        assert step == 2
        assert "epoch=0-step=2.ckpt could not be written: Not a directory. Its tensors take " in words
        assert "on_save_error='warn'" in words
        assert seconds < 20


def warned(strategy: str, folder: Path) -> tuple[tuple[int, str, float], list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = fit(strategy, folder)
    return found, [str(each.message) for each in caught if "could not be written" in str(each.message)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", NAMES)
def test_training_goes_on_if_asked_for(name: str, form: str, ranks: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (first, of_first), (second, of_second) = ranks(2).run(
        warned, f"{name}:{form},on_save_error=warn", tmp_path / "file" / "folder"
    )
    assert (first[:2], second[:2]) == ((4, ""), (4, ""))
    assert (len(of_first), len(of_second)) == (2, 0)  # one for each checkpoint, on rank 0


def full_then_free(strategy: str, folder: Path) -> list[list[str]]:
    """Names of the files that are there behind each of three saves, of which the second one fails."""
    seen = []

    class Fails(ModelCheckpoint):
        def on_train_batch_end(self, *args: Any) -> None:
            trainer = args[0]
            blocker = folder / "epoch=0-step=2.ckpt"
            if trainer.global_step == 2 and trainer.is_global_zero:
                (blocker / "full").mkdir(parents=True)  # no file can take the place of a folder
            super().on_train_batch_end(*args)
            seen.append(sorted(each.name for each in folder.iterdir() if each.is_file()))
            trainer.strategy.barrier()

    callbacks = [Fails(folder, every_n_train_steps=1, enable_version_counter=False)]
    trainer = trainer_for(strategy, 2, callbacks=callbacks, enable_checkpointing=True, max_steps=3)
    trainer.fit(DeepTied(), loader(num_readers(strategy, 2)))
    return seen


@pytest.mark.filterwarnings("ignore")
def test_a_save_that_fails_does_not_remove_the_one_before(ranks: Any, tmp_path: Path) -> None:
    seen = ranks(2).run(quietly, full_then_free, "ddp_custom:on_save_error=warn", tmp_path)[0]
    assert seen == [["epoch=0-step=1.ckpt"], ["epoch=0-step=1.ckpt"], ["epoch=0-step=3.ckpt"]]


def quietly(job: Any, *args: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return job(*args)


def remote(strategy: str) -> list[str]:
    callback = ModelCheckpoint("memory://checkpoints", every_n_train_steps=2)
    trainer_for(strategy, 2, callbacks=[callback], enable_checkpointing=True).fit(DeepTied(), loader(2))
    found = [path for path in fsspec.filesystem("memory").find("/") if path.endswith(".ckpt")]
    return [Path(path).name for path in found]


def test_other_file_systems_are_written_as_before(ranks: Any) -> None:
    first, second = ranks(2).run(remote, "ddp_custom")
    assert (first, second) == (["epoch=0-step=4.ckpt"], [])


def after_fit(strategy: str, path: Path) -> str:
    trainer = trainer_for(strategy, 2)
    trainer.fit(DeepTied(), loader(num_readers(strategy, 2)))
    trainer.save_checkpoint(path)
    try:
        trainer.save_checkpoint(path / "within")
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", NAMES)
def test_after_the_fit_as_within(name: str, ranks: Any, tmp_path: Path) -> None:
    first, second = ranks(2).run(after_fit, name, tmp_path / "a.ckpt")
    assert first == second
    assert "a.ckpt/within could not be written" in first
    assert torch.load(tmp_path / "a.ckpt", weights_only=False)["global_step"] == 4


def full_on_one_rank(strategy: str, folder: Path, failing: int) -> tuple[int, str, float, bool]:
    """As `fit`, where the disk of one rank is full; and whether anything is left."""
    write = FolderWriter.write

    def raising(self: FolderWriter, *args: Any) -> Any:
        if dist.get_rank() == failing:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(self, *args)

    with mock.patch.object(FolderWriter, "write", raising):
        found = fit(strategy, folder)
    return *found, bool(list(folder.iterdir()))


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("name", NAMES)
def test_a_rank_that_cannot_write_is_heard_by_all(name: str, failing: int, ranks: Any, tmp_path: Path) -> None:
    found = ranks(2).run(full_on_one_rank, f"{name}:checkpoint=sharded", tmp_path, failing)
    for step, words, seconds, is_left in found:
        assert step == 2
        assert "epoch=0-step=2.ckpt could not be written: No space left on device. Its tensors take " in words
        assert seconds < 20
        assert not is_left
    assert found[0][1] == found[1][1]


def kept_and_resumed(strategy: str, folder: Path) -> tuple[list[str], str, int]:
    """The checkpoints that are kept of four, what a run with ``ckpt_path="last"`` reads, and its updates."""
    callback = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=2, monitor="step", mode="max", save_last=True)
    readers = num_readers(strategy.partition(":")[0], 2)
    trainer_for(strategy, 2, callbacks=[callback], enable_checkpointing=True).fit(DeepTied(), loader(readers))
    dist.barrier()
    kept = sorted(each.name for each in folder.iterdir())
    again = ModelCheckpoint(folder, save_last=True)
    trainer = trainer_for(strategy, 2, callbacks=[again], enable_checkpointing=True, max_epochs=2)
    trainer.fit(DeepTied(), loader(readers), ckpt_path="last")
    return kept, Path(trainer.ckpt_path or "").name, trainer.global_step


@pytest.mark.parametrize("name", NAMES)
def test_folders_are_kept_and_removed_as_files_are(name: str, ranks: Any, tmp_path: Path) -> None:
    for kept, last, updates in ranks(2).run(quietly, kept_and_resumed, f"{name}:checkpoint=sharded", tmp_path):
        assert kept == ["epoch=0-step=3.ckpt", "epoch=0-step=4.ckpt", "last.ckpt"]
        assert (last, updates) == ("last.ckpt", 8)


def saved_over(strategy: str, folder: Path, epochs: int) -> tuple[list[bool], int]:
    """Go on from the last checkpoint, and save over it; whether those that are there are folders, and the updates."""
    callback = ModelCheckpoint(folder, every_n_train_steps=2, save_last=True)
    trainer = trainer_for(strategy, 2, callbacks=[callback], enable_checkpointing=True, max_epochs=epochs)
    trainer.fit(
        DeepTied(), loader(num_readers(strategy.partition(":")[0], 2)), ckpt_path="last" if epochs > 1 else None
    )
    dist.barrier()
    return [each.is_dir() for each in folder.iterdir()], trainer.global_step


@pytest.mark.parametrize("name", NAMES)
def test_another_form_takes_the_place_of_the_one_before(name: str, ranks: Any, tmp_path: Path) -> None:
    """Also where nobody asks for it: with ``auto`` it follows the memory, which is another on other ranks."""
    for epochs, form in enumerate(("sharded", "whole", "async-sharded", "async-whole"), start=1):
        for kinds, updates in ranks(2).run(quietly, saved_over, f"{name}:checkpoint={form}", tmp_path, epochs):
            assert (kinds, updates) == ([form.endswith("sharded")] * 2, 4 * epochs)


def saved_to(strategy: str, path: Path) -> str:
    trainer = trainer_for(strategy, 2, max_steps=1)
    trainer.fit(DeepTied(), loader(2))
    try:
        trainer.save_checkpoint(path)
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("form", "why"), [("whole", "Is a directory"), ("sharded", "Directory not empty")])
def test_a_folder_of_the_users_is_left_alone(form: str, why: str, ranks: Any, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "results.csv").write_text("1")
    for words in ranks(2).run(saved_to, f"fsdp_custom:checkpoint={form}", tmp_path / "runs"):
        assert f"runs could not be written: {why}. " in words
    assert (tmp_path / "runs" / "results.csv").read_text() == "1"


def forms_by_memory(strategy: str, folder: Path) -> list[bool]:
    """Whether a checkpoint is a folder where rank 0 has much memory, and where it has little."""
    found = []
    for memory in (2**40, 2**15):
        path = folder / f"{memory}.ckpt"
        # Another machine has another memory.
        with mock.patch("lightning_parallel.strategies.whole_checkpoints.host_memory", return_value=memory):
            trainer = trainer_for(strategy, 2, max_steps=1)
            trainer.fit(DeepTied(), loader(num_readers(strategy, 2)))
            trainer.save_checkpoint(path)
        found.append(path.is_dir())
    return found


class Renames(DeepTied):
    """Saves its weights under other names, as those who hand them on do."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        own = checkpoint["state_dict"]
        checkpoint["state_dict"] = {name.removeprefix("model."): own[name] for name in own}


@pytest.mark.parametrize("name", ["fsdp_custom", "pp_custom"])
def test_hooks_may_give_tensors_other_names(name: str, ranks: Any, tmp_path: Path) -> None:
    for form in ("whole", "sharded"):
        ranks(2).run(quietly, within_fit, f"{name}:checkpoint={form}", tmp_path / form)
    ours = open_folder(tmp_path / "sharded", lambda rest: torch.load(rest, weights_only=True))["state_dict"]
    theirs = torch.load(tmp_path / "whole", weights_only=True)["state_dict"]
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[each], theirs[each]) for each in theirs)


class Rewrites(DeepTied):
    """Changes what is saved by name, as those do who leave out a frozen network, and notes what it sees."""

    num_states = 0

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self.num_states += 1  # as often on all ranks, which may meet in it
        return super().state_dict(*args, **kwargs)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        own = checkpoint["state_dict"]
        self.saw = [(name, tuple(value.shape), value.dtype) for name, value in own.items()]
        assert all(torch.isfinite(value).all() and float(value.norm()) >= 0 for value in own.values())
        own["model.norm.weight"] = own["model.norm.weight"].cpu() * 2
        del own["model.norm.bias"]
        own["model.tokens.weight"] = own.pop("model.tokens.weight").half()


def rewritten(strategy: str, num_ranks: int, path: Path) -> tuple[list[Any], Any, Any, int]:
    """What the hook has seen, what a rank finds in the file, the weights, and how often these were asked for."""
    L.seed_everything(3, verbose=False)
    trainer, module = trainer_for(strategy, num_ranks, max_steps=1, callbacks=[Saves(path)]), Rewrites()
    trainer.fit(module, loader(num_readers(strategy, num_ranks) if num_ranks > 1 else 1))
    number = module.num_states
    return module.saw, torch.load(path, weights_only=True)["state_dict"], full_state_dict(trainer), number


@pytest.mark.parametrize("name", ["ddp_custom", "zero1_custom", "fsdp_custom", "tp_custom", "pp_custom"])
def test_hooks_change_entries_by_name_on_all_ranks(name: str, ranks: Any, tmp_path: Path) -> None:
    found = ranks(2).run(rewritten, name, 2, tmp_path / "ours.ckpt", deadline=60)
    saw, *_ = rewritten("auto", 1, tmp_path / "one.ckpt")
    assert found[0][0] == found[1][0] == saw
    assert found[0][3] == found[1][3]
    saved, weights = found[0][1], found[0][2]
    assert set(saved) == set(weights) - {"model.norm.bias"}
    assert torch.equal(saved["model.norm.weight"], weights["model.norm.weight"] * 2)
    assert torch.equal(saved["model.tokens.weight"], weights["model.tokens.weight"].half())
    assert all(not value.is_meta for value in saved.values())


class Saves(Callback):
    """Saves behind each step."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        trainer.save_checkpoint(self.path)


def within_fit(strategy: str, path: Path) -> None:
    L.seed_everything(3, verbose=False)
    trainer = trainer_for(strategy, 2, max_steps=1, callbacks=[Saves(path)])
    trainer.fit(Renames(), loader(num_readers(strategy.partition(":")[0], 2)))


def forms_of_others(folder: Path) -> list[bool]:
    """Whether checkpoints are folders where rank 0 has little memory, with a plugin, and with a remote folder."""
    found = []
    with mock.patch("lightning_parallel.strategies.whole_checkpoints.host_memory", return_value=2**15):
        for number, options in enumerate(({"plugins": [TorchCheckpointIO()]}, {"default_root_dir": "memory://runs"})):
            trainer = trainer_for("fsdp_custom", 2, max_steps=1, **options)
            trainer.fit(DeepTied(), loader(2))
            trainer.save_checkpoint(folder / str(number))
            found.append((folder / str(number)).is_dir())
    return found


def test_plugins_and_remote_folders_take_files(ranks: Any, tmp_path: Path) -> None:
    assert ranks(2).run(quietly, forms_of_others, tmp_path) == [[False, False], [False, False]]
    with pytest.raises(ConfigurationError, match="the plugin TorchCheckpointIO is not asked; leave the plugin out"):
        trainer_for("fsdp_custom:checkpoint=async-sharded", 2, plugins=[TorchCheckpointIO()])
    with pytest.raises(ConfigurationError, match="checkpoint='zip' is unknown; possible: auto, whole, sharded, async"):
        trainer_for("fsdp_custom:checkpoint=zip", 2)


def test_the_form_follows_the_size(ranks: Any, tmp_path: Path) -> None:
    assert ranks(2).run(forms_by_memory, "fsdp_custom", tmp_path) == [[False, True], [False, True]]

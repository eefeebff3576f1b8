"""The average in the sharded form of checkpoints: each rank writes its part, and reads what it has elsewhere."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from lightning_parallel.callbacks import ExponentialMovingAverage
from lightning_parallel.checkpoint.chosen_weights import ChosenWeights, averages_in
from lightning_parallel.checkpoint.opened import damage_in, open_checkpoint
from lightning_parallel.checkpoint.stored_tensors import StoredFolder, StoredTensors
from tests.data import loader
from tests.jobs.averages import DECAY, fit_until
from tests.models.cases import CASES
from tests.models.pipelined import DeepTied
from tests.parity import TOLERANCE, difference, trainer_for

KEY = "ExponentialMovingAverage"
FOUR = ("hsdp_custom", "fsdp_custom:shard=2,pipeline=2", "fsdp_custom:tensor=2,shard=2")


def run(ranks: Any, strategy: str, job: Any, *args: Any) -> list[Any]:
    size = 4 if strategy.startswith(FOUR) else 2
    found: list[Any] = ranks(size).run(job, strategy, size, *args)
    return found


def in_parts(strategy: str) -> str:
    return f"{strategy}{',' if ':' in strategy else ':'}checkpoint=sharded"


@pytest.mark.parametrize(
    ("writer", "readers"),
    [
        ("fsdp_custom", ["hsdp_custom", "pp_custom"]),
        ("pp_custom", ["fsdp_custom", "pp_custom", "tp_custom"]),
        ("ddp_custom", ["zero2_custom"]),
        ("hsdp_custom", ["fsdp_custom"]),
        ("fsdp_custom:tensor=2,shard=2", ["pp_custom"]),
    ],
)
def test_any_strategy_goes_on_with_the_average_that_ranks_wrote(
    ranks: Any, tmp_path: Path, writer: str, readers: list[str]
) -> None:
    path = tmp_path / "saved.ckpt"
    whole = run(ranks, in_parts(writer), fit_until, str(path), False)[0]
    assert damage_in(path) == ""
    rest = torch.load(path / "rest.pt", weights_only=True)
    assert rest["callbacks"][KEY] == {"steps": 3}
    stored = [key for key in StoredFolder(path).tensors if key.startswith(f"callbacks.{KEY}.average.")]
    ((keys, names),) = rest["callback_tensors"]
    assert list(keys) == [KEY, "average"]
    assert len(stored) == len(names) > 0
    for reader in readers:
        found = run(ranks, reader, fit_until, str(path), True)[0]
        assert difference(found["average"], whole["average"]) <= TOLERANCE, reader
        assert difference(found["weights"], whole["weights"]) <= TOLERANCE, reader
        # the sanity check of the resumed run, and the test of the checkpoint, see the average of the checkpoint
        assert found["val"] == pytest.approx([whole["val"][0], whole["val"][1]], abs=TOLERANCE)
        assert found["test"] == pytest.approx(whole["val"][0], abs=TOLERANCE)


def test_tied_weights_on_two_stages_have_one_average(ranks: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "saved.ckpt")
    whole = run(ranks, in_parts("fsdp_custom:shard=2,pipeline=2"), fit_until, path, False, DeepTied)[0]
    found = run(ranks, "pp_custom", fit_until, path, True, DeepTied)[0]
    assert difference(found["average"], whole["average"]) <= TOLERANCE
    assert difference(found["weights"], whole["weights"]) <= TOLERANCE


def bytes_of_reads(strategy: str, num_ranks: int, path: str) -> tuple[int, int, bool]:
    """Elements that this rank reads of the average; how many there are; whether one was asked for whole."""
    count, is_whole = [0], []
    read, get = StoredFolder.read, StoredTensors.__getitem__

    def counting(self: Any, targets: Any) -> None:
        parts = (getattr(t, "_local_tensor", t) for key, t in targets.items() if key.startswith("callbacks."))
        count[0] += sum(part.numel() for part in parts)
        read(self, targets)

    def noting(self: Any, name: str) -> Any:
        is_whole.append(self._prefix.startswith("callbacks."))
        return get(self, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StoredFolder, "read", counting)
        patch.setattr(StoredTensors, "__getitem__", noting)
        average = ExponentialMovingAverage(DECAY)
        trainer = trainer_for(strategy, num_ranks, max_epochs=2, callbacks=[average])
        trainer.fit(CASES["hf_gpt2"]("adamw"), loader(num_ranks, 3, "hf_gpt2"), ckpt_path=path)
    return count[0], sum(each.numel() for each in average._average.tensors.values()), any(is_whole)


def test_a_rank_reads_its_part_alone(ranks: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "saved.ckpt")
    run(ranks, in_parts("fsdp_custom"), fit_until, path, False)
    for count, whole, is_whole in run(ranks, "fsdp_custom", bytes_of_reads, path):
        assert 0 < count < 0.6 * whole
        assert not is_whole


def saved_again(strategy: str, num_ranks: int, path: str, other: str) -> None:
    """A checkpoint of what was loaded and never brought into the form of the parameters."""
    average = ExponentialMovingAverage(DECAY, swap_for_validation=False)
    trainer = trainer_for(strategy, num_ranks, callbacks=[average])
    trainer.validate(CASES["hf_gpt2"]("adamw"), loader(num_ranks, 1, "hf_gpt2"), ckpt_path=path, verbose=False)
    trainer.save_checkpoint(other)


def test_an_average_that_nothing_has_asked_for_is_saved_again(ranks: Any, tmp_path: Path) -> None:
    path, other = tmp_path / "saved.ckpt", tmp_path / "other.ckpt"
    run(ranks, in_parts("fsdp_custom"), fit_until, str(path), False)
    run(ranks, in_parts("fsdp_custom"), saved_again, str(path), str(other))
    first, second = (averages_in(open_checkpoint(each)) for each in (path, other))
    assert list(first) == list(second)
    assert difference(dict(first), dict(second)) == 0


class Nested(ExponentialMovingAverage):
    """Keeps the state one level deeper."""

    def state_dict(self) -> dict[str, Any]:
        return {"inner.one": {"state": super().state_dict()}, "other": 3}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict["inner.one"]["state"])


def nested(strategy: str, num_ranks: int, path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The average of a fit, and that which another one has loaded when it ends at once."""
    found = []
    for epochs, ckpt_path in ((1, None), (1, path)):
        average = Nested(DECAY)
        trainer = trainer_for(strategy, num_ranks, callbacks=[average], max_epochs=epochs)
        trainer.fit(CASES["hf_gpt2"]("adamw"), loader(num_ranks, 2, "hf_gpt2"), ckpt_path=ckpt_path)
        if ckpt_path is None:
            trainer.save_checkpoint(path)
        found.append(average._average)
    return tuple({name: each.whole(name) for name in each.tensors} for each in found)  # type: ignore[return-value]


def test_a_state_may_be_nested(ranks: Any, tmp_path: Path) -> None:
    first, second = ranks(2).run(nested, in_parts("fsdp_custom"), 2, str(tmp_path / "a.ckpt"))[0]
    assert len(first) > 0
    assert difference(second, first) == 0


def restored_in_the_middle(strategy: str, num_ranks: int, folder: str) -> dict[str, Any]:
    """A checkpoint that is loaded in the middle of a fit, and removed at once, as `Tuner.lr_find` does it."""
    average = ExponentialMovingAverage(DECAY)
    path = str(Path(folder) / "a.ckpt")

    class Restores(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
            if trainer.global_step == 2:
                trainer.save_checkpoint(path)
                checkpoint = trainer.strategy.load_checkpoint(path)
                average.load_state_dict(copy.deepcopy(checkpoint["callbacks"][average.state_key]))
                trainer.strategy.remove_checkpoint(path)

    callbacks = [average, Restores()] if folder else [average]
    L.seed_everything(3, verbose=False)
    trainer = trainer_for(strategy, num_ranks, callbacks=callbacks)
    trainer.fit(CASES["hf_gpt2"]("adamw"), loader(num_ranks, 4, "hf_gpt2"))
    return average.full_state_dict(trainer)


@pytest.mark.parametrize("form", ["sharded", "whole"])
@pytest.mark.parametrize("name", ["ddp_custom", "fsdp_custom"])
def test_a_state_that_is_loaded_in_the_middle_of_a_fit_goes_on(
    ranks: Any, tmp_path: Path, name: str, form: str
) -> None:
    strategy = f"{name}:checkpoint={form}"
    expected = ranks(2).run(restored_in_the_middle, strategy, 2, "")[0]
    found = ranks(2).run(restored_in_the_middle, strategy, 2, str(tmp_path))[0]
    assert difference(found, expected) == 0


def saved_behind_training(strategy: str, num_ranks: int, path: str) -> dict[str, Any]:
    """A save in the background, during which the average moves; and the average at the time of the save."""
    average, found = ExponentialMovingAverage(DECAY), dict[str, Any]()

    class Save(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
            if trainer.global_step == 2:
                found.update(average.full_state_dict(trainer))
                trainer.save_checkpoint(path)

    trainer = trainer_for(strategy, num_ranks, callbacks=[average, Save()])
    trainer.fit(CASES["hf_gpt2"]("adamw"), loader(num_ranks, 4, "hf_gpt2"))
    return found


def test_a_save_in_the_background_has_the_average_of_its_step(ranks: Any, tmp_path: Path) -> None:
    path = tmp_path / "saved.ckpt"
    strategy = "fsdp_custom:checkpoint=async-sharded"
    then = ranks(2).run(saved_behind_training, strategy, 2, str(path))[0]
    checkpoint = open_checkpoint(path)
    exported = ChosenWeights(checkpoint["state_dict"], averages=averages_in(checkpoint))
    assert difference({name: exported[name] for name in exported}, then) == 0
    twin = copy.deepcopy(checkpoint["callbacks"])[KEY]["average"]
    assert twin.folder is checkpoint["callbacks"][KEY]["average"].folder


def of_nothing_yet(strategy: str, num_ranks: int, path: str) -> tuple[int, int]:
    """The number of averages in a checkpoint of before the first update, and behind the fit that goes on from it."""
    saves = ExponentialMovingAverage(DECAY, start_step=100)
    trainer = trainer_for(strategy, num_ranks, callbacks=[saves])
    trainer.fit(CASES["hf_gpt2"]("adamw"), loader(num_ranks, 2, "hf_gpt2"))
    trainer.save_checkpoint(path)
    goes_on = ExponentialMovingAverage(DECAY)
    trainer = trainer_for(strategy, num_ranks, callbacks=[goes_on], max_epochs=2)
    trainer.fit(CASES["hf_gpt2"]("adamw"), loader(num_ranks, 2, "hf_gpt2"), ckpt_path=path)
    return len(saves._average.tensors), len(goes_on._average.tensors)


@pytest.mark.parametrize("name", ["ddp_custom", "fsdp_custom"])
def test_a_checkpoint_of_before_the_first_update(ranks: Any, tmp_path: Path, name: str) -> None:
    before, after = ranks(2).run(of_nothing_yet, in_parts(name), 2, str(tmp_path / "a.ckpt"))[0]
    assert before == 0
    assert after > 0

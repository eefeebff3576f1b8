"""`ModelCheckpoint(save_on_exception=True)`: all ranks save, and the run goes on from there, or none and it says so."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_parallel import full_state_dict
from lightning_parallel.strategies import exception_saves, failures
from tests.data import loader
from tests.models.pipelined import DeepTied
from tests.names import num_readers
from tests.parity import TOLERANCE, largest, trainer_for
from tests.rank_pool import RankError

WHERE = ["hook", "step", "layer"]


class Fails(DeepTied):
    """Raises in the third step on given ranks: before it, in its layers, or after the update."""

    def __init__(self, where: str, failing: tuple[int, ...]) -> None:
        super().__init__("adamw")
        self.where, self.failing = where, failing

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.fail("step", batch_idx)
        handle = self.model.blocks[0].register_forward_hook(lambda *args: self.fail("layer", batch_idx))
        try:
            return super().training_step(batch, batch_idx)
        finally:
            handle.remove()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.fail("hook", batch_idx + 1)

    def fail(self, where: str, batch_idx: int) -> None:
        if where == self.where and batch_idx == 2 and self.global_rank in self.failing:
            raise ValueError("planted")


def after_exceptions(folder: str) -> ModelCheckpoint:
    return ModelCheckpoint(folder, filename="saved", save_on_exception=True, every_n_train_steps=100)


def interrupted(strategy: str, where: str, folder: str, failing: tuple[int, ...] = (0, 1), size: int = 2) -> list[str]:
    """A fit that raises; the notes of the error, which rank 1 writes down, too."""
    saving = after_exceptions(folder)
    trainer = trainer_for(strategy, size, enable_checkpointing=True, callbacks=[saving])
    torch.manual_seed(3)
    short = mock.patch.multiple(failures, GRACE=3.0, POLL=0.2), mock.patch.object(exception_saves, "WAIT", 1.0)
    with short[0], short[1], pytest.raises(ValueError, match="planted") as caught:
        trainer.fit(Fails(where, failing), loader(num_readers(strategy, size)))
    assert "on_exception" not in vars(saving)
    notes = getattr(caught.value, "__notes__", [])
    if trainer.global_rank == 1:
        Path(folder, "notes").write_text("\n".join(notes))
    return notes


def finished(strategy: str, folder: str, size: int = 2) -> dict[str, Any]:
    """The weights at the end of a run that goes on from what was saved."""
    trainer = trainer_for(strategy, size, enable_checkpointing=True, callbacks=[after_exceptions(folder)])
    torch.manual_seed(4)
    trainer.fit(Fails("nowhere", ()), loader(num_readers(strategy, size)), ckpt_path=f"{folder}/saved.ckpt")
    return full_state_dict(trainer)


def uninterrupted() -> dict[str, Any]:
    """The weights at the end of a run of one process that nothing stops."""
    trainer = trainer_for("auto", 1)
    torch.manual_seed(3)
    trainer.fit(Fails("nowhere", ()), loader(1))
    return full_state_dict(trainer)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("strategy", ["ddp_custom", "fsdp_custom", "tp_custom", "pp_custom"])
def test_the_run_goes_on_from_what_all_ranks_have_saved(ranks: Any, strategy: str, where: str, tmp_path: Path) -> None:
    if strategy == "pp_custom" and where != "hook":
        pytest.skip("a stage waits for the one before it")
    folder = str(tmp_path)
    assert ranks(2).run(interrupted, strategy, where, folder) == [[], []]
    found, expected = ranks(2).run(finished, strategy, folder)[0], uninterrupted()
    assert largest((found[name] - expected[name]).abs().max() for name in expected) <= TOLERANCE


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("strategy", ["ddp_custom", "fsdp_custom", "tp_custom", "pp_custom"])
def test_a_rank_that_raises_alone_saves_nothing_and_says_so(
    ranks: Any, strategy: str, where: str, tmp_path: Path
) -> None:
    began = time.monotonic()
    failing = 0 if (strategy, where) == ("pp_custom", "layer") else 1
    with pytest.raises(RankError) as caught:
        ranks(2).run(interrupted, strategy, where, str(tmp_path), (failing,))
    assert time.monotonic() - began < 60
    assert f"rank {failing} raised ValueError: planted" in str(caught.value)
    assert not list(tmp_path.glob("*.ckpt"))
    if failing == 1:
        assert "rank 1 has raised this alone" in (tmp_path / "notes").read_text()

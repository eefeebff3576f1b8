"""`NonFinite` ends a run after some skipped updates in a row, and keeps the samples that each rank has read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_parallel import NonFiniteError, build_strategy
from lightning_parallel.callbacks import NonFinite
from tests.data import GLOBAL_BATCH, data_of, loader
from tests.models.cases import ByteGPT
from tests.parity import make_trainer, trainer_for


class FromBatch2(ByteGPT):
    """Its loss is infinite on the last rank, from batch 2 of some epochs on, and all gradients are finite."""

    epochs = (0,)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        is_bad = batch_idx >= 2 and self.global_rank == self.trainer.world_size - 1
        return self.loss(*batch) + (torch.inf if is_bad and self.current_epoch in self.epochs else 0.0)


class InSecondEpoch(FromBatch2):
    epochs = (1,)


class InBothEpochs(FromBatch2):
    epochs = (0, 1)


class Dealt(Callback):
    """The samples of each batch, told from their tokens."""

    def __init__(self) -> None:
        rows = data_of("byte_gpt", 10 * GLOBAL_BATCH, GLOBAL_BATCH)
        self.numbers = {tuple(rows[i][0].tolist()): i for i in range(10 * GLOBAL_BATCH)}
        self.samples: list[list[int]] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.samples.append([self.numbers[tuple(row.tolist())] for row in batch[0]])


def ended(
    strategy: str, size: int, folder: Path, most: int = 3, make: Any = FromBatch2, shuffle: bool = False, **kwargs: Any
) -> tuple[str, list[list[int]]]:
    """Two epochs of five batches, with the error that ends them and the samples of each batch."""
    L.seed_everything(3, verbose=False)
    built, dealt = build_strategy(strategy) if "custom" in strategy else strategy, Dealt()
    settings = {"callbacks": [NonFinite(most), dealt], "max_epochs": 2, "limit_train_batches": 5, **kwargs}
    trainer = make_trainer(built, size, default_root_dir=folder, **settings)
    data = data_of("byte_gpt", 10 * GLOBAL_BATCH, GLOBAL_BATCH)
    try:
        trainer.fit(make("adamw"), DataLoader(data, GLOBAL_BATCH // size, shuffle=shuffle))
    except NonFiniteError as error:
        return str(error), dealt.samples
    return "", dealt.samples


def written(folder: Path) -> dict[str, Any]:
    (path,) = folder.iterdir()
    content: dict[str, Any] = json.loads(path.read_text())
    return content


@pytest.mark.parametrize(
    ("strategy", "make", "shuffle", "step"),
    [("ddp_custom", FromBatch2, False, 2), ("ddp_custom", InSecondEpoch, True, 7), ("ddp", FromBatch2, False, 2)],
)
def test_ranks_end_after_some_in_a_row(
    ranks: Any, tmp_path: Path, strategy: str, make: Any, shuffle: bool, step: int
) -> None:
    """Said by rank 0; the file has the samples of each rank, as they were dealt out in that epoch."""
    (first, *_), (second, *_) = found = ranks(2).run(ended, strategy, 2, tmp_path, make=make, shuffle=shuffle)
    assert second == "updates were skipped in a row; rank 0 says which"
    assert first.startswith(
        f"3 updates of AdamW in a row were skipped, from global_step={step} to {step + 2}, and max_consecutive=3 of "
        "NonFinite ends the run: the loss was not finite on rank 1. The batches of each rank are in "
        f"{tmp_path}/non_finite_steps_{step + 3}.json. "
    )
    content = written(tmp_path)
    assert (content["optimizer"], content["max_consecutive"]) == ("AdamW", 3)
    assert [each["global_step"] for each in content["steps"]] == [step, step + 1, step + 2]
    for number, each in enumerate(content["steps"]):
        for rank, (_, samples) in enumerate(found):
            batch = {"epoch": make.epochs[0], "batch_idx": 2 + number, "samples": samples[step + number]}
            assert each["ranks"][rank] == {"rank": rank, "loss_is_finite": rank == 0, "batches": [batch]}


def test_fewer_in_a_row_do_not_end_the_run(tmp_path: Path) -> None:
    """Three in each epoch, with finite ones between."""
    assert ended("auto", 1, tmp_path, 4, InBothEpochs)[0] == ""
    assert not list(tmp_path.iterdir())


def test_samples_of_a_random_order_are_not_guessed(tmp_path: Path) -> None:
    assert "from global_step=1 to 2," in ended("auto", 1, tmp_path, 2, shuffle=True, accumulate_grad_batches=2)[0]
    batches = written(tmp_path)["steps"][0]["ranks"][0]["batches"]
    assert batches == [{"epoch": 0, "batch_idx": number, "samples": None} for number in (2, 3)]


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    words, _ = ended("auto", 1, tmp_path / "file")
    assert f"could not be written to {tmp_path}/file/non_finite_steps_5.json (" in words


def test_counts_go_on_after_a_resume(tmp_path: Path) -> None:
    """In the middle of an epoch, where the loader begins anew."""
    saved = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1)
    settings = {"callbacks": [NonFinite(9), saved], "enable_checkpointing": True, "max_epochs": 1}
    assert ended("auto", 1, tmp_path, **settings)[0] == ""
    settings["callbacks"] = [skips := NonFinite(3), ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1)]
    trainer = make_trainer("auto", 1, default_root_dir=tmp_path / "then", **settings)
    with pytest.raises(NonFiniteError, match="3 updates of AdamW in a row were skipped, from global_step=2 to 4"):
        trainer.fit(FromBatch2("adamw"), loader(1, 10), ckpt_path=tmp_path / "epoch=0-step=4.ckpt")
    assert skips.num_skipped == 3
    batches = [step["ranks"][0]["batches"][0] for step in written(tmp_path / "then")["steps"]]
    assert [batch["batch_idx"] for batch in batches] == [2, 3, 4]
    assert [batch["samples"] for batch in batches] == [None, None, list(range(GLOBAL_BATCH))]


class GradientsFromBatch2(FromBatch2):
    """Its losses are finite."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(*batch)
        if batch_idx >= 2:
            loss.register_hook(lambda gradient: gradient * torch.nan)
        return loss


def test_gradients_alone(tmp_path: Path) -> None:
    words, _ = ended("auto", 1, tmp_path, make=GradientsFromBatch2)
    assert "ends the run: gradients were not finite, though all losses were. The" in words


def test_a_run_that_has_ended_may_go_on(tmp_path: Path) -> None:
    """Its checkpoint has the whole row, and the next steps are finite."""
    ended_row = [{"global_step": step, "batches": [{"epoch": 0, "batch_idx": step}]} for step in range(3)]
    skips = NonFinite(3)
    trainer = trainer_for("auto", 1, callbacks=[skips], accumulate_grad_batches=2)
    trainer.fit(ByteGPT("adamw"), loader(1, 2))
    skips.load_state_dict({"num_skipped": 3, "in_a_row": [ended_row]})
    trainer.fit_loop.max_epochs = 2
    trainer.fit(ByteGPT("adamw"), loader(1, 2))
    assert trainer.global_step == 2
    assert skips.state_dict() == {"num_skipped": 3, "in_a_row": [[]]}

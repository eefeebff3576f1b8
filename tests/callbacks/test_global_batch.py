"""`GlobalBatch`, against plain Lightning in one process which accumulates by hand."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from lightning_parallel import ConfigurationError, full_state_dict
from lightning_parallel.callbacks.global_batch import GlobalBatch
from lightning_parallel.callbacks.gradient_norm import GradientNorm
from lightning_parallel.callbacks.learning_rate import ScaledLearningRate
from tests.data import data_of
from tests.jobs.global_batches import (
    MICROBATCH,
    SIZE,
    WINDOWS,
    Failing,
    Listed,
    OwnLoader,
    accumulation,
    microbatches,
    refusal,
    run,
)
from tests.jobs.lifecycle import Weights
from tests.models.cases import CASES, ByteGPT
from tests.names import SEPARATE, num_ranks
from tests.parity import TOLERANCE, difference, trainer_for


class OneCycle(ByteGPT):
    """Plans its schedule by the number of steps, as many people do."""

    planned = 0

    def configure_optimizers(self) -> Any:
        self.planned = self.trainer.estimated_stepping_batches
        self.planned_accumulation = self.trainer.accumulate_grad_batches
        optimizer = torch.optim.AdamW(self.parameters(), eps=1e-4)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=self.planned)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Windows(Callback):
    """The mean loss and the samples of each optimizer step, of all ranks together."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.samples: list[list[tuple[int, ...]]] = []
        self._open: list[tuple[float, list[tuple[int, ...]]]] = []

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = outputs["loss"].item() * trainer.accumulate_grad_batches  # Lightning has divided it
        self._open.append((loss, [tuple(row) for row in batch[0].tolist()]))
        if trainer.fit_loop._should_accumulate():
            return
        mine: list[Any] = [self._open]
        if trainer.world_size > 1:
            mine = [None] * trainer.world_size
            dist.all_gather_object(mine, self._open)
        microsteps = [microstep for one in mine for microstep in one]
        self.losses.append(sum(loss for loss, _ in microsteps) / len(microsteps))
        self.samples.append(sorted(row for _, rows in microsteps for row in rows))
        self._open = []


def global_batches(
    strategy: str, size: int, callback_size: int | None = SIZE, *, shuffle: bool = False, **kwargs: Any
) -> dict[str, Any]:
    """Three steps of 16 samples from a loader whose batch is 2, whatever the number of ranks."""
    L.seed_everything(3, verbose=False)
    module, windows = OneCycle("adamw"), Windows()
    callbacks = [windows] if callback_size is None else [windows, GlobalBatch(callback_size)]
    trainer = trainer_for(strategy, size, callbacks=callbacks, **kwargs)
    trainer.fit(module, microbatches(shuffle=shuffle))
    return {
        "losses": windows.losses,
        "samples": windows.samples,
        "planned": (module.planned, module.planned_accumulation),
        "steps": trainer.global_step,
        "after": trainer.accumulate_grad_batches,
        "weights": full_state_dict(trainer),
    }


@pytest.mark.parametrize("name", ["auto", "dp_custom", *SEPARATE])
def test_same_steps_on_any_number_of_ranks(ranks: Any, name: str) -> None:
    """Equal to plain Lightning in one process which accumulates by hand: samples of each step, losses and weights."""
    reference = global_batches("auto", 1, None, accumulate_grad_batches=SIZE // MICROBATCH)
    start = full_weights(OneCycle)
    found = run(ranks, name, global_batches)
    size = 1 if name in ("auto", "dp_custom") else num_ranks(name)
    assert found["samples"] == reference["samples"]
    assert [len(samples) for samples in found["samples"]] == [SIZE] * WINDOWS
    assert found["losses"] == pytest.approx(reference["losses"], abs=TOLERANCE)
    assert difference(found["weights"], reference["weights"]) <= TOLERANCE
    assert difference(found["weights"], start) > 1e-3
    assert found["planned"] == (WINDOWS, SIZE // MICROBATCH // size)
    assert found["steps"] == WINDOWS
    assert found["after"] == 1


def test_shuffled_steps_are_the_same_on_two_and_four_ranks(ranks: Any) -> None:
    """One process draws its order in another way, so it is no reference here."""
    two = ranks(2).run(global_batches, "ddp_custom", 2, shuffle=True)[0]
    four = ranks(4).run(global_batches, "hsdp_custom", 4, shuffle=True)[0]
    assert two["samples"] == four["samples"]
    assert two["samples"] != global_batches("auto", 1)["samples"]
    assert difference(two["weights"], four["weights"]) <= TOLERANCE


def full_weights(module_class: Any) -> Weights:
    L.seed_everything(3, verbose=False)
    return {name: value.clone() for name, value in module_class("adamw").state_dict().items()}


def test_equals_one_large_batch() -> None:
    """Not only the same grouping: one batch of 16 without any accumulation."""
    L.seed_everything(3, verbose=False)
    trainer = trainer_for("auto", 1)
    trainer.fit(OneCycle("adamw"), microbatches(SIZE))
    assert difference(global_batches("auto", 1)["weights"], full_state_dict(trainer)) <= TOLERANCE


def two_epochs(strategy: str, size: int, path: str, is_resumed: bool) -> Weights:
    L.seed_everything(11 if is_resumed else 3, verbose=False)

    class Save(Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, *args: Any) -> None:
            if trainer.current_epoch == 0 and not is_resumed:
                trainer.save_checkpoint(path)

    trainer = trainer_for(strategy, size, callbacks=[GlobalBatch(SIZE), Save()], max_epochs=2)
    trainer.fit(OneCycle("adamw"), microbatches(), ckpt_path=path if is_resumed else None)
    assert trainer.global_step == 2 * WINDOWS
    return full_state_dict(trainer)


@pytest.mark.parametrize("name", ["ddp_custom", "fsdp_custom"])
def test_a_run_goes_on_with_another_number_of_ranks(ranks: Any, tmp_path: Path, name: str) -> None:
    path = str(tmp_path / "one.ckpt")
    uninterrupted = two_epochs("auto", 1, path, False)
    assert difference(run(ranks, name, two_epochs, path, True), uninterrupted) <= TOLERANCE


class Data(L.LightningDataModule):
    def __init__(self, batch_size: int | None = 2) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.asked = 0

    def setup(self, stage: str) -> None:
        self.data = data_of("byte_gpt", SIZE * WINDOWS, SIZE)

    def train_dataloader(self) -> Any:
        self.asked += 1
        torch.rand(1)  # a loader may draw numbers, as random_split does
        return DataLoader(self.data, batch_size=self.batch_size)


class OwnSetup(OwnLoader):
    def setup(self, stage: str) -> None:
        self.is_set_up = True


class Growing(OwnLoader):
    """Another batch size in each epoch."""

    def train_dataloader(self) -> Any:
        return microbatches(2 if self.trainer.current_epoch == 0 else 4)


def test_every_source_of_loaders() -> None:
    assert accumulation(ByteGPT(), microbatches(), GlobalBatch(SIZE)) == 8
    assert accumulation(Listed(), [microbatches(4)], GlobalBatch(SIZE)) == 4
    assert accumulation(Listed(), [microbatches(), microbatches()], GlobalBatch(SIZE, batch_size=2)) == 8
    assert accumulation(ByteGPT(), Data(), GlobalBatch(SIZE)) == 8
    assert accumulation(OwnLoader(), None, GlobalBatch(SIZE)) == 8
    assert accumulation(OwnSetup(), None, GlobalBatch(SIZE, batch_size=2)) == 8
    sampler = BatchSampler(SequentialSampler(range(16)), 8, drop_last=False)
    by_sampler = DataLoader(data_of("byte_gpt", 16, 16), batch_sampler=sampler)
    assert accumulation(ByteGPT(), by_sampler, GlobalBatch(SIZE, batch_size=8)) == 2
    assert accumulation(ByteGPT(), microbatches(4), GlobalBatch(SIZE, batch_size=4)) == 4


def test_asking_a_data_module_early_changes_no_random_numbers() -> None:
    numbers = []
    for callbacks in ([], [GlobalBatch(2)]):
        L.seed_everything(3, verbose=False)
        data = Data()
        trainer_for("auto", 1, callbacks=callbacks).fit(ByteGPT(), data)
        assert data.asked == 1 + len(callbacks)
        numbers.append(torch.rand(1).item())
    assert numbers[0] == numbers[1]


def test_sizes_that_do_not_divide() -> None:
    message = refusal(ByteGPT(), microbatches(4), GlobalBatch(18))
    assert "GlobalBatch(size=18) is no multiple of the 4 samples of a microstep (batch_size 4 x 1 rank)" in message
    assert "give size 16 or 20; or for size 18, give the loader batch_size 1, 2, 3, 6, 9" in message
    assert "number of ranks" not in message  # 4 does not divide 18: no number of ranks will do
    assert "give size 4; or for size 2, give the loader batch_size 1, 2" in refusal(
        ByteGPT(), microbatches(4), GlobalBatch(2)
    )


def refused_on_ranks(strategy: str, size: int, *callbacks: Callback) -> str:
    trainer = trainer_for(strategy, size, callbacks=list(callbacks))
    try:
        trainer.fit(ByteGPT(), microbatches(4))
    except ConfigurationError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("callback", "words"),
    [
        (GlobalBatch(SIZE), "needs 2 microsteps of batch_size 4 x 2 ranks, but optimizer_in_backward=True"),
        (ScaledLearningRate(1), "optimizer_in_backward=True updates parameters before it"),
        (GradientNorm(), "optimizer_in_backward=True uses each up at once"),
        (GlobalBatch(8), ""),
    ],
)
def test_updates_in_backward_are_refused(ranks: Any, callback: Callback, words: str) -> None:
    found = ranks(2).run(refused_on_ranks, "fsdp_custom:optimizer_in_backward=true", 2, callback)[0]
    assert words in found
    assert bool(words) == bool(found)


@pytest.mark.parametrize("name", ["ddp_custom", "fsdp_custom"])
def test_refusal_on_ranks_has_the_numbers_of_ranks(ranks: Any, name: str) -> None:
    first, second = ranks(2).run(refused_on_ranks, name, 2, GlobalBatch(12))
    assert "12) is no multiple of the 8 samples of a microstep (batch_size 4 x 2 ranks); give size 8 or 16" in first
    assert "batch_size 1, 2, 3, 6; or train on a number of ranks out of 1, 3" in first
    assert second == "refused; rank 0 says why"


@pytest.mark.parametrize(
    ("module", "data", "words"),
    [
        (Listed, [microbatches(), microbatches()], "there are 2 training loaders"),
        (ByteGPT, DataLoader(data_of("byte_gpt", 8, 8), batch_size=None), "batch_size=None, so its data set makes"),
        (
            ByteGPT,
            DataLoader(data_of("byte_gpt", 8, 8), batch_sampler=BatchSampler(range(8), 2, False)),
            "has a batch_sampler, whose batches may be of any size; give batch_size=",
        ),
        (ByteGPT, [[torch.zeros(2, 16)]], "is a Tensor, not a torch DataLoader"),
        (OwnSetup, None, "which may need what OwnSetup.setup makes, and that runs only later; give batch_size="),
    ],
)
def test_loaders_that_do_not_say_their_batch_size(module: Any, data: Any, words: str) -> None:
    assert words in refusal(module(), data, GlobalBatch(SIZE))


def test_everything_else_is_refused_in_words() -> None:
    assert "batch_size=4 was given, but the training loader has batch_size=2" in refusal(
        ByteGPT(), microbatches(), GlobalBatch(SIZE, batch_size=4)
    )
    for module, data in ((OwnSetup(), None), (ByteGPT(), Data())):  # known only when training begins
        assert "batch_size=4 was given, but" in refusal(module, data, GlobalBatch(SIZE, batch_size=4))
    assert "the training loader has batch_size=4 now, but had batch_size=2" in refusal(
        Growing(), None, GlobalBatch(SIZE), max_epochs=2, reload_dataloaders_every_n_epochs=1
    )
    found = refusal(ByteGPT(), microbatches(), GlobalBatch(SIZE), accumulate_grad_batches=2)
    assert "accumulate_grad_batches=2 was given to the Trainer" in found
    found = refusal(ByteGPT(), microbatches(), GlobalBatch(SIZE), GradientAccumulationScheduler({0: 2}))
    assert "GradientAccumulationScheduler changes the global batch by epoch" in found
    found = refusal(CASES["gan"](), microbatches(3, "gan"), GlobalBatch(SIZE))
    assert "module's own affair under manual optimization" in found
    assert "no multiple of the 3 samples" in found  # all at once
    with pytest.raises(ConfigurationError, match=r"size=0 is no number of samples; give 1 or more"):
        GlobalBatch(0)


def test_accumulation_is_given_back_after_an_error() -> None:
    with pytest.raises(ArithmeticError):
        accumulation(Failing(), microbatches(), GlobalBatch(SIZE))  # looks itself


def test_says_once_what_it_derived(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "lightning.pytorch.utilities.rank_zero"):
        callbacks = [GlobalBatch(SIZE), ScaledLearningRate(4, warmup_epochs=1.5)]
        trainer_for("auto", 1, callbacks=callbacks, max_epochs=2).fit(ByteGPT(), microbatches())
    said = [record.getMessage() for record in caplog.records]
    assert said.count("GlobalBatch: 16 samples a step = batch_size 2 x 1 rank x 8 microsteps") == 1
    (message,) = [message for message in said if message.startswith("ScaledLearningRate")]
    assert "the global batch is 16 = batch_size 2 x 1 rank x 8 microsteps, so k = 4 for reference_batch=4" in message
    assert "multiplied by 1 at first and by k after 4 updates" in message  # three steps an epoch, 1.5 epochs

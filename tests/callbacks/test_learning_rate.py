"""`GlobalBatch` and `ScaledLearningRate`, against one process and against loops written by hand in plain torch."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from lightning_parallel import ConfigurationError, LightningCLI, full_state_dict
from lightning_parallel.callbacks.global_batch import GlobalBatch
from lightning_parallel.callbacks.gradient_norm import GradientNorm
from lightning_parallel.callbacks.learning_rate import ScaledLearningRate
from tests.data import GLOBAL_BATCH, data_of
from tests.jobs.lifecycle import StopAt, Weights
from tests.models.cases import CASES, ByteGPT
from tests.names import SEPARATE, num_ranks
from tests.parity import TOLERANCE, difference, trainer_for

SIZE = 16
WINDOWS = 3
MICROBATCH = 2


def microbatches(
    batch_size: int = MICROBATCH, case: str = "byte_gpt", num_samples: int = SIZE * WINDOWS, *, shuffle: bool = False
) -> Any:
    return DataLoader(data_of(case, num_samples, SIZE), batch_size=batch_size, shuffle=shuffle)


def run(ranks: Any, name: str, job: Any, *args: Any) -> Any:
    """Rank 0's answer of ``job(name, number of ranks, ...)``."""
    if name in ("auto", "dp_custom"):
        return job(name, 1, *args)
    return ranks(num_ranks(name)).run(job, name, num_ranks(name), *args)[0]


# GlobalBatch --------------------------------------------------------------------------------------------------------


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


class OwnLoader(ByteGPT):
    def train_dataloader(self) -> Any:
        return microbatches()


class OwnSetup(OwnLoader):
    def setup(self, stage: str) -> None:
        self.is_set_up = True


class Growing(OwnLoader):
    """Another batch size in each epoch."""

    def train_dataloader(self) -> Any:
        return microbatches(2 if self.trainer.current_epoch == 0 else 4)


class Listed(ByteGPT):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch[0], batch_idx)


def accumulation(module: Any, data: Any, *callbacks: Callback, **kwargs: Any) -> int:
    """What it was while training."""
    seen = []

    class Look(Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
            seen.append(trainer.accumulate_grad_batches)

    trainer = trainer_for("auto", 1, callbacks=[*callbacks, Look()], **kwargs)
    try:
        trainer.fit(module, data)
    finally:
        assert trainer.accumulate_grad_batches == kwargs.get("accumulate_grad_batches", 1)
    assert len(set(seen)) == 1
    return seen[0]


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


def refusal(module: Any, data: Any, *callbacks: Callback, **kwargs: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        accumulation(module, data, *callbacks, **kwargs)
    return str(caught.value)


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


class Failing(ByteGPT):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 3:
            raise ArithmeticError
        return super().training_step(batch, batch_idx)


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


# ScaledLearningRate -------------------------------------------------------------------------------------------------

REFERENCE = 2
"""The global batch of 8 is four times this."""
RAMP = 5
STEPS = 8


def scheduler_of(name: str, optimizer: torch.optim.Optimizer) -> Any:
    """A schedule of some six steps; cosine is the form that goes on from what it reads in the groups."""
    schedulers = torch.optim.lr_scheduler
    if name == "step":
        return schedulers.StepLR(optimizer, 2, 0.5)
    if name == "cosine":
        return schedulers.CosineAnnealingLR(optimizer, STEPS)
    return schedulers.LambdaLR(optimizer, lambda step: 0.9**step)


class Scheduled(ByteGPT):
    scheduler = "lambda"
    is_tensor = False

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.parameters() if p.ndim >= 2]
        vectors = [p for p in self.parameters() if p.ndim < 2]
        rate = torch.tensor(0.01) if self.is_tensor else 0.01
        groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=rate, eps=1e-4)
        scheduler = {"scheduler": scheduler_of(self.scheduler, optimizer), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


class SteppedSchedule(Scheduled):
    scheduler = "step"


class CosineSchedule(Scheduled):
    scheduler = "cosine"


class TensorRate(Scheduled):
    is_tensor = True


class Rates(Callback):
    """What monitors and hooks see: inside the closure, and after each batch."""

    def __init__(self) -> None:
        self.outside: list[float] = []
        self.inside: list[float] = []

    def on_before_optimizer_step(self, trainer: L.Trainer, module: Any, optimizer: Any) -> None:
        self.inside.append(float(optimizer.param_groups[0]["lr"]))

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        self.outside.append(float(trainer.optimizers[0].param_groups[0]["lr"]))


def scaled(strategy: str, size: int, module_class: Any, reference_batch: int = REFERENCE) -> dict[str, Any]:
    L.seed_everything(3, verbose=False)
    rates, module = Rates(), module_class("adamw")
    callback = ScaledLearningRate(reference_batch, warmup_steps=RAMP, log="lr_scale")
    factors: list[float] = []

    class Factors(Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
            factors.append(trainer.callback_metrics["lr_scale"].item())

    trainer = trainer_for(strategy, size, callbacks=[callback, rates, Factors()])
    batch = GLOBAL_BATCH // size
    trainer.fit(module, microbatches(batch, num_samples=GLOBAL_BATCH * STEPS))
    return {
        "weights": full_state_dict(trainer),
        "outside": rates.outside,
        "inside": rates.inside,
        "factors": factors,
        "hooks": [len(o._optimizer_step_pre_hooks) + len(o._optimizer_step_post_hooks) for o in trainer.optimizers],
    }


def factor_at(step: int, k: float, ramp: int = RAMP) -> float:
    return k if step >= ramp else 1 + (k - 1) * (step / ramp)


def by_hand(module_class: Any, k: float) -> dict[str, Any]:
    """The same in plain torch: the rate is written into the groups for the step, and taken out before the schedule."""
    L.seed_everything(3, verbose=False)
    module = module_class("adamw")
    conf = module.configure_optimizers()
    optimizer, scheduler = conf["optimizer"], conf["lr_scheduler"]["scheduler"]
    rates = []
    for step, batch in enumerate(microbatches(GLOBAL_BATCH, num_samples=GLOBAL_BATCH * STEPS)):
        optimizer.zero_grad()
        module.loss(*batch).backward()
        own = [float(group["lr"]) if not module.is_tensor else group["lr"].clone() for group in optimizer.param_groups]
        rates.append(float(own[0]))
        for group, rate in zip(optimizer.param_groups, own, strict=True):
            group["lr"] = rate * factor_at(step, k)
        optimizer.step()
        for group, rate in zip(optimizer.param_groups, own, strict=True):
            group["lr"] = rate
        scheduler.step()
    return {"weights": dict(module.state_dict()), "rates": rates}


SCHEDULES = [SteppedSchedule, CosineSchedule, Scheduled, TensorRate]


@pytest.mark.parametrize("reference_batch", [REFERENCE, 32])
@pytest.mark.parametrize("module_class", SCHEDULES)
def test_exactly_a_loop_written_by_hand(module_class: Any, reference_batch: int) -> None:
    """Also for k = 8 / 32 < 1."""
    k = GLOBAL_BATCH / reference_batch
    expected, found = by_hand(module_class, k), scaled("auto", 1, module_class, reference_batch)
    assert difference(found["weights"], expected["weights"]) == 0
    assert difference(found["weights"], by_hand(module_class, 1.0)["weights"]) > 1e-3
    assert found["outside"] == found["inside"] == expected["rates"]
    assert found["factors"] == pytest.approx([factor_at(step, k) for step in range(STEPS)])
    assert found["hooks"] == [0]


@pytest.mark.parametrize("name", ["dp_custom", *SEPARATE])
def test_every_strategy(ranks: Any, name: str) -> None:
    expected = by_hand(CosineSchedule, GLOBAL_BATCH / REFERENCE)
    found = run(ranks, name, scaled, CosineSchedule)
    assert difference(found["weights"], expected["weights"]) <= TOLERANCE
    assert found["outside"] == found["inside"] == expected["rates"]
    assert found["factors"] == pytest.approx([factor_at(step, 4.0) for step in range(STEPS)])
    assert found["hooks"] == [0]


@pytest.mark.parametrize("name", ["fsdp_custom", "zero1_custom"])
def test_a_tensor_as_rate_on_ranks(ranks: Any, name: str) -> None:
    expected = by_hand(TensorRate, GLOBAL_BATCH / REFERENCE)
    assert difference(run(ranks, name, scaled, TensorRate)["weights"], expected["weights"]) <= TOLERANCE


def manual(strategy: str, size: int, path: str | None = None, stop: int | None = None) -> dict[str, Any]:
    """The GAN: two optimizers, each with a count of its own. Resumes from `path` unless it is to stop there."""
    L.seed_everything(3 if stop or path is None else 11, verbose=False)
    module = CASES["gan"]("adamw")
    callback = ScaledLearningRate(REFERENCE, warmup_steps=RAMP, log="lr_scale")
    rest = [] if stop is None else [StopAt(2 * stop)]
    trainer = trainer_for(strategy, size, callbacks=[callback, *rest], max_epochs=2)
    data = microbatches(GLOBAL_BATCH // size, "gan", GLOBAL_BATCH * 3)
    trainer.fit(module, data, ckpt_path=None if stop else path)
    if stop is not None:
        trainer.save_checkpoint(path)
    names = ("lr_scale_0", "lr_scale_1")
    return {
        "weights": full_state_dict(trainer),
        "factors": [trainer.callback_metrics[name].item() for name in names],
        "counts": callback.state_dict(),
    }


def gan_by_hand() -> Weights:
    """The GAN's own `training_step`, with optimizers whose rates are set around each step."""
    L.seed_everything(3, verbose=False)
    module = CASES["gan"]("adamw")
    optimizers = module.configure_optimizers()

    class Stepping:
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer, self.count = optimizer, itertools.count()
            self.zero_grad = optimizer.zero_grad

        def step(self) -> None:
            (group,), factor = self.optimizer.param_groups, factor_at(next(self.count), GLOBAL_BATCH / REFERENCE)
            own, group["lr"] = group["lr"], group["lr"] * factor
            self.optimizer.step()
            group["lr"] = own

    stepping = [Stepping(optimizer) for optimizer in optimizers]
    module.optimizers = lambda: stepping  # type: ignore[method-assign]
    module.toggle_optimizer = lambda s: (
        module.requires_grad_(False)
        and [  # type: ignore[method-assign]
            p.requires_grad_(True) for g in s.optimizer.param_groups for p in g["params"]
        ]
    )
    module.untoggle_optimizer = lambda s: module.requires_grad_(True)  # type: ignore[method-assign]
    module.manual_backward = lambda loss: loss.backward()  # type: ignore[method-assign]
    module.clip_gradients = lambda s, **_: torch.nn.utils.clip_grad_norm_(  # type: ignore[method-assign]
        [p for g in s.optimizer.param_groups for p in g["params"]], 0.5
    )
    for _ in range(2):
        for number, batch in enumerate(microbatches(GLOBAL_BATCH, "gan", GLOBAL_BATCH * 3)):
            module.training_step(batch, number)
    return dict(module.state_dict())


@pytest.mark.parametrize("name", ["auto", *SEPARATE])
def test_manual_optimization_with_two_optimizers(ranks: Any, name: str) -> None:
    found = run(ranks, name, manual)
    assert difference(found["weights"], gan_by_hand()) <= (0 if name == "auto" else TOLERANCE)
    assert found["counts"] == {"num_updates": [6, 6]}
    assert found["factors"] == [4.0, 4.0]


@pytest.mark.parametrize("name", ["auto", "ddp_custom", "zero1_custom", "fsdp_custom"])
def test_resume_in_the_middle_of_the_ramp(ranks: Any, tmp_path: Path, name: str) -> None:
    path = str(tmp_path / "gan.ckpt")
    uninterrupted = run(ranks, name, manual)
    stopped = run(ranks, name, manual, path, 3)
    assert stopped["counts"] == {"num_updates": [3, 3]}
    assert stopped["factors"] == [pytest.approx(factor_at(2, 4.0))] * 2
    resumed = run(ranks, name, manual, path)
    assert resumed["counts"] == {"num_updates": [6, 6]}
    assert difference(resumed["weights"], uninterrupted["weights"]) <= (0 if name == "auto" else TOLERANCE)
    assert difference(resumed["weights"], stopped["weights"]) > 1e-3


def factors_of(*callbacks: Callback, module: Any = None, data: Any = None, **kwargs: Any) -> list[float]:
    """The factor after each batch."""
    factors: list[float] = []

    class Look(Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
            factors.append(trainer.callback_metrics["lr_scale"].item() if trainer.global_step else 0.0)

    trainer = trainer_for("auto", 1, callbacks=[*callbacks, Look()], **kwargs)
    trainer.fit(module or ByteGPT(), microbatches(2, num_samples=8) if data is None else data)
    return factors


def test_ramp_in_epochs() -> None:
    """Four batches an epoch; two microsteps a step."""
    callback = ScaledLearningRate(1, warmup_epochs=1.5, log="lr_scale")
    found = factors_of(callback, max_epochs=3, accumulate_grad_batches=2)
    assert found[1::2] == pytest.approx([1, 2, 3, 4, 4, 4])
    assert factors_of(ScaledLearningRate(1, warmup_epochs=0, log="lr_scale")) == [2.0] * 4


def test_follows_the_accumulation_scheduler() -> None:
    """Epoch 0 has four steps with k = 2, later ones two with k = 4: the ramp of two epochs is six steps."""
    for callbacks in itertools.permutations(
        (ScaledLearningRate(1, warmup_epochs=2, log="lr_scale"), GradientAccumulationScheduler({1: 2}))
    ):
        found = factors_of(*callbacks, max_epochs=3)
        assert found[:4] == pytest.approx([1 + step / 6 for step in range(4)])
        assert found[5:8:2] == pytest.approx([1 + 3 * step / 6 for step in (4, 5)])
        assert found[9::2] == [4.0, 4.0]


def test_together_with_global_batch() -> None:
    callbacks = GlobalBatch(4), ScaledLearningRate(2, warmup_steps=0, log="lr_scale")
    assert factors_of(*callbacks) == [0.0, 2.0, 2.0, 2.0]


def test_another_trainer_starts_the_ramp_again() -> None:
    callback = ScaledLearningRate(1, warmup_steps=4, log="lr_scale")
    first, second = factors_of(callback), factors_of(callback)
    assert first == second == pytest.approx([1, 1.25, 1.5, 1.75])


class SetsItsRate(Scheduled):
    """Sets the rate in the closure, which stays what was set."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.optimizers().param_groups[0]["lr"] = 0.1 / (1 + batch_idx)
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class ByLBFGS(ByteGPT):
    """Reads its rate before it calls the closure, and calls that more than once."""

    rate = 0.01

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=self.rate, max_iter=2)


class ByLBFGSAtTwice(ByLBFGS):
    rate = 0.02


def final(module: Callable[[str], L.LightningModule], *callbacks: Callback) -> tuple[Weights, float]:
    L.seed_everything(3, verbose=False)
    trainer = trainer_for("auto", 1, callbacks=list(callbacks))
    trainer.fit(module("sgd"), microbatches(2, num_samples=8))
    return full_state_dict(trainer), trainer.optimizers[0].param_groups[0]["lr"]


def test_a_rate_set_in_the_closure_is_scaled_and_kept() -> None:
    class SetsTwice(SetsItsRate):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.optimizers().param_groups[0]["lr"] = 0.1 / (1 + batch_idx) * 2
            return ByteGPT.training_step(self, batch, batch_idx)

    found, rate = final(SetsItsRate, ScaledLearningRate(1, warmup_steps=0))
    assert difference(found, final(SetsTwice)[0]) == 0
    assert rate == 0.1 / 4


def test_lbfgs() -> None:
    found, rate = final(ByLBFGS, ScaledLearningRate(1, warmup_steps=0))
    assert difference(found, final(ByLBFGSAtTwice)[0]) == 0
    assert rate == 0.01


class Subclass(torch.optim.SGD):
    """Its parent's step runs the hooks again, once any plain SGD has been made."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class BySubclass(ByteGPT):
    def configure_optimizers(self) -> Any:
        torch.optim.SGD(self.parameters(), lr=0.1)
        return Subclass(self.parameters(), lr=0.1)


class ByParent(ByteGPT):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_step_inside_a_step_is_scaled_once() -> None:
    callback = ScaledLearningRate(1, warmup_steps=3)
    found, rate = final(BySubclass, callback)
    assert callback.state_dict() == {"num_updates": [4]}
    assert difference(found, final(ByParent, ScaledLearningRate(1, warmup_steps=3))[0]) == 0
    assert rate == 0.1


class Fails(torch.optim.SGD):
    """Raises in its own code in its second step."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        self.steps += 1
        if self.steps == 2:
            raise ArithmeticError
        return super().step() or loss


class StepFails(ByteGPT):
    def configure_optimizers(self) -> Any:
        return Fails(self.parameters(), lr=0.1)


class StepFailsAndIsCaught(StepFails):
    """Batch 1: the optimizer's own code fails. Batch 2: the closure fails, and the step is made once more."""

    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__(optimizer)
        self.automatic_optimization = False
        self.caught: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        for _ in range(2 if batch_idx == 2 else 1):
            assert optimizer.param_groups[0]["lr"] == 0.1
            try:
                optimizer.step(lambda: self.closure(batch, batch_idx, optimizer))
            except ArithmeticError:
                self.caught.append(batch_idx)

    def closure(self, batch: Any, batch_idx: int, optimizer: Any) -> None:
        if batch_idx == 2 and 2 not in self.caught:
            raise ArithmeticError
        optimizer.zero_grad()
        self.manual_backward(self.loss(*batch))


@pytest.mark.parametrize("module_class", [Failing, StepFails])
def test_rates_are_given_back_after_an_error(module_class: Any) -> None:
    """Of the closure, and of the optimizer's own code."""
    trainer = trainer_for("auto", 1, callbacks=[ScaledLearningRate(1, warmup_steps=0)])
    with pytest.raises(ArithmeticError):
        trainer.fit(module_class(), microbatches(2))
    (optimizer,) = trainer.optimizers
    assert [group["lr"] for group in optimizer.param_groups] == [0.1]
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


def test_a_module_that_catches_errors_of_steps_goes_on() -> None:
    callback = ScaledLearningRate(1, warmup_steps=3)
    module = StepFailsAndIsCaught("sgd")
    _, rate = final(lambda _: module, callback)
    assert module.caught == [1, 2]
    assert callback.state_dict() == {"num_updates": [3]}  # of batches 0, 2 and 3
    assert rate == 0.1


def skipped_steps(strategy: str, size: int) -> dict[str, Any]:
    """fp16 whose second loss is not finite, so that the scaler skips that step."""
    L.seed_everything(3, verbose=False)

    class Module(ByteGPT):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) * (float("inf") if batch_idx == 1 else 1.0)

    callback = ScaledLearningRate(REFERENCE, warmup_steps=RAMP)
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**8))
    trainer = trainer_for(strategy, size, plugins=[plugin], callbacks=[callback])
    trainer.fit(Module(), microbatches(GLOBAL_BATCH // size, num_samples=GLOBAL_BATCH * 4))
    return callback.state_dict()


@pytest.mark.parametrize("name", ["auto", "fsdp_custom", "ddp_custom"])
def test_steps_that_fp16_skips_are_not_counted(ranks: Any, name: str) -> None:
    assert run(ranks, name, skipped_steps) == {"num_updates": [3]}


class NoRate(torch.optim.SGD):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        for group in self.param_groups:
            del group["lr"]


class ByNoRate(ByteGPT):
    def configure_optimizers(self) -> Any:
        return NoRate(self.parameters())


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(data_of("byte_gpt", 8, 8))


def test_scaling_is_refused_in_words() -> None:
    stream = DataLoader(Stream(), batch_size=2)
    assert "has no length, so warmup_epochs=5 is no number of updates; give warmup_steps=" in refusal(
        ByteGPT(), stream, ScaledLearningRate(1)
    )
    assert factors_of(ScaledLearningRate(1, warmup_steps=2, log="lr_scale"), data=stream) == [1.0, 1.5, 2.0, 2.0]
    found = refusal(Listed(), [microbatches(), microbatches()], ScaledLearningRate(1))
    assert "there are 2 training loaders" in found
    loaders = [microbatches(2, num_samples=8)] * 2
    assert (
        factors_of(ScaledLearningRate(1, warmup_steps=0, batch_size=4, log="lr_scale"), module=Listed(), data=loaders)
        == [4.0] * 4
    )
    assert "batch_size=4 was given, but the training loader has batch_size=2" in refusal(
        ByteGPT(), microbatches(), ScaledLearningRate(1, batch_size=4)
    )
    found = refusal(ByNoRate(), microbatches(), ScaledLearningRate(1))
    assert 'NoRate has groups without "lr", so there is no rate to scale' in found
    with pytest.raises(ConfigurationError) as caught:
        ScaledLearningRate(0, warmup_epochs=-1, warmup_steps=-2)
    assert len(caught.value.violations) == 4


def test_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the command line, with simple types."""
    text = """
    trainer:
      callbacks:
        - class_path: lightning_parallel.callbacks.global_batch.GlobalBatch
          init_args: {size: 16}
        - class_path: lightning_parallel.callbacks.learning_rate.ScaledLearningRate
          init_args: {reference_batch: 8, warmup_epochs: 2, log: lr_scale}
        - class_path: lightning_parallel.callbacks.gradient_norm.GradientNorm
          init_args: {norm_type: 1.0}
      accelerator: cpu
      logger: false
      enable_checkpointing: false
      enable_progress_bar: false
      enable_model_summary: false
      max_epochs: 1
    """
    path = tmp_path / "config.yaml"
    path.write_text(text)
    monkeypatch.setattr("sys.argv", ["train.py", "fit", "--config", str(path)])
    cli = LightningCLI(OwnLoader, save_config_callback=None)
    assert cli.trainer.callback_metrics["lr_scale"].item() == pytest.approx(1 + 2 / 6)
    assert cli.trainer.callback_metrics["grad_norm"].item() > 0

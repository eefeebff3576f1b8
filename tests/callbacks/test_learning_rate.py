"""`ScaledLearningRate`, against one process and against loops written by hand in plain torch."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_parallel import ConfigurationError, LightningCLI, full_state_dict
from lightning_parallel.callbacks.global_batch import GlobalBatch
from lightning_parallel.callbacks.learning_rate import ScaledLearningRate
from tests.data import GLOBAL_BATCH, data_of
from tests.jobs.global_batches import Listed, OwnLoader, microbatches, refusal, run
from tests.jobs.lifecycle import StopAt, Weights
from tests.models.cases import CASES, ByteGPT
from tests.models.scheduled import STEPS, CosineSchedule, Scheduled, SteppedSchedule, TensorRate
from tests.names import SEPARATE
from tests.parity import TOLERANCE, difference, trainer_for

REFERENCE = 2
"""The global batch of 8 is four times this."""

RAMP = 5


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
    seed_everything: 3
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

"""An average of the weights that is kept in one process, and fits with ours."""

from __future__ import annotations

import copy
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lightning_parallel import full_state_dict
from lightning_parallel.callbacks import ExponentialMovingAverage
from tests.data import loader
from tests.models.cases import CASES
from tests.names import num_readers
from tests.parity import TOLERANCE, difference, trainer_for

DECAY = 0.7
"""Small, so that an update that is missing or made twice shows."""


class PlainAverage(Callback):
    """The reference, for one process: counts the optimizers' own steps, and averages every parameter."""

    def __init__(self, every_n_steps: int = 1, start_step: int = 0) -> None:
        self.every_n_steps, self.start_step = every_n_steps, start_step
        self.average: dict[str, Tensor] = {}
        self.val_losses: list[float] = []
        self.steps = 0
        self.stepped = False

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for optimizer in trainer.optimizers:
            optimizer.register_step_post_hook(self.note)

    def note(self, *args: Any) -> None:
        self.stepped = True

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        if self.stepped:
            self.steps += 1
            if self.steps > self.start_step and self.steps % self.every_n_steps == 0:
                new = {name: p.detach().clone() for name, p in pl_module.named_parameters()}
                old = self.average or new
                self.average = {name: DECAY * old[name] + (1 - DECAY) * new[name] for name in new}
        self.stepped = False

    def full_state_dict(self, trainer: L.Trainer) -> dict[str, Tensor]:
        module = trainer.lightning_module
        first: dict[Tensor, str] = {}
        names = {n: first.setdefault(p, n) for n, p in module.named_parameters(remove_duplicate=False)}
        return {n: self.average.get(names.get(n, n), v).clone() for n, v in module.state_dict().items()}

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        other = copy.deepcopy(pl_module)
        other.load_state_dict(self.full_state_dict(trainer))
        with torch.no_grad():
            losses = [other.loss(*batch).item() for batch in trainer.val_dataloaders]
        self.val_losses.append(sum(losses) / len(losses))


class Observer(Callback):
    """Notes each validation's loss, and the first weights."""

    def __init__(self) -> None:
        self.val_losses: list[float] = []
        self.first: dict[str, Tensor] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.first = full_state_dict(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.val_losses.append(trainer.callback_metrics["val_loss"].item())


def readers_of(strategy: str, num_ranks: int) -> int:
    """How many ranks read different samples."""
    if strategy in ("auto", "reference"):
        return 1
    name, _, options = strategy.partition(":")
    return num_readers(name, num_ranks) // (2 if "pipeline=2" in options or "tensor=2" in options else 1)


def train(
    strategy: str, num_ranks: int, case: Any, accumulate: int = 1, reference: bool = False, **settings: int
) -> dict[str, Any]:
    """Six batches with validation after two and at the end; the same with the reference in place of the callback."""
    L.seed_everything(3, verbose=False)
    module = CASES[case]("adamw") if isinstance(case, str) else case()
    name = case if isinstance(case, str) else "byte_gpt"
    average: Any = PlainAverage(**settings) if reference else ExponentialMovingAverage(DECAY, **settings)
    observer = Observer()
    has_validation = not isinstance(module, CASES["gan"])
    trainer = trainer_for(
        strategy,
        num_ranks,
        callbacks=[average, observer],
        accumulate_grad_batches=accumulate,
        num_sanity_val_steps=0 if reference else 1,
        val_check_interval=2 if has_validation else None,
    )
    readers = readers_of(strategy, num_ranks)
    val = loader(readers, 2, name) if has_validation else None
    trainer.fit(module, loader(readers, 6, name), val)
    found = {
        "average": average.full_state_dict(trainer),
        "weights": full_state_dict(trainer),
        "first": observer.first,
        "val": average.val_losses if reference else observer.val_losses[1:],
    }
    if has_validation and not reference:
        found["after"] = trainer.validate(module, val, verbose=False)[0]["val_loss"]
        found["weights after"] = full_state_dict(trainer)
    return found


REFERENCES: dict[Any, dict[str, Any]] = {}


def reference_of(case: Any, accumulate: int = 1, **settings: int) -> dict[str, Any]:
    key = (case, accumulate, *sorted(settings.items()))
    if key not in REFERENCES:
        REFERENCES[key] = train("auto", 1, case, accumulate, True, **settings)
    return REFERENCES[key]


def assert_equal(found: dict[str, Any], reference: dict[str, Any]) -> None:
    assert difference(found["average"], reference["average"]) <= TOLERANCE
    assert difference(found["weights"], reference["weights"]) <= TOLERANCE
    assert found["val"] == pytest.approx(reference["val"], abs=TOLERANCE)
    assert difference(found["average"], found["weights"]) > 1e-3
    assert difference(found["average"], found["first"]) > 1e-3


def fit_until(
    strategy: str, num_ranks: int, path: str, resumed: bool, make: Any = CASES["hf_gpt2"], sanity: int = -1
) -> dict[str, Any]:
    """Two epochs; a checkpoint after the first, or from it on with other first weights."""
    L.seed_everything(11 if resumed else 3, verbose=False)
    average, observer = ExponentialMovingAverage(DECAY), Observer()

    class Save(Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, *args: Any) -> None:
            if trainer.current_epoch == 0:
                trainer.save_checkpoint(path)

    trainer = trainer_for(
        strategy,
        num_ranks,
        max_epochs=2,
        num_sanity_val_steps=sanity if resumed else 0,
        callbacks=[average, observer] if resumed else [average, observer, Save()],
    )
    ckpt_path = path if resumed else None
    readers = readers_of(strategy, num_ranks)
    trainer.fit(make("adamw"), *(loader(readers, n, "hf_gpt2") for n in (3, 2)), ckpt_path=ckpt_path)
    whole, weights = average.full_state_dict(trainer), full_state_dict(trainer)
    tested = trainer.test(make("adamw"), loader(readers, 2, "hf_gpt2"), ckpt_path=path, verbose=False)
    return {"average": whole, "weights": weights, "val": observer.val_losses, "test": tested[0]["test_loss"]}

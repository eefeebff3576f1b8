"""On one rank nothing is sharded: what only sharding forbids is allowed, and copies are those of one process."""

from __future__ import annotations

import copy
import functools
import multiprocessing
import pickle
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_parallel.presets import PRESETS
from tests.data import loader
from tests.jobs.fits import fit_module
from tests.models.cases import GPT, ByteGPT, Case, next_token_loss
from tests.models.unusual import KeptInAList, SparseTable, WithLBFGS, WithParameterHook
from tests.parity import TOLERANCE, difference, trainer_for

ALONE = [name for name in PRESETS if name != "fsdp_offload_custom"]
"""Names that leave a module as it is on one rank; offload keeps its parameters elsewhere."""

# What sharding forbids ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [KeptInAList, WithParameterHook, SparseTable, WithLBFGS])
@pytest.mark.parametrize("name", ["fsdp_custom", "tp_custom"])
def test_modules_that_cannot_be_sharded(name: str, make: Callable[[], L.LightningModule]) -> None:
    assert difference(fit_module(make, name, 1), fit_module(make, "auto", 1)) <= TOLERANCE


def averaging() -> list[Callback]:
    found: list[Callback] = [callbacks.StochasticWeightAveraging(1e-2, swa_epoch_start=1, annealing_epochs=1)]
    return [*found, *([callbacks.EMAWeightAveraging()] if hasattr(callbacks, "EMAWeightAveraging") else [])]


@pytest.mark.parametrize("which", range(len(averaging())), ids=lambda index: type(averaging()[index]).__name__)
@pytest.mark.parametrize("name", ["ddp_custom", "fsdp_custom"])
def test_averaging_callbacks_of_lightning(name: str, which: int) -> None:
    found, expected = (
        fit_module(ByteGPT, each, 1, callbacks=[averaging()[which]], max_epochs=3) for each in (name, "auto")
    )
    assert difference(found, expected) <= TOLERANCE
    assert difference(expected, fit_module(ByteGPT, "auto", 1, max_epochs=3)) > TOLERANCE


class BuiltLate(Case):
    """Has its model only once `configure_model` was called."""

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            self.model = GPT()

    def loss(self, tokens: Tensor) -> Tensor:
        return next_token_loss(self.model(tokens), tokens)


@pytest.mark.skipif(not hasattr(callbacks, "EMAWeightAveraging"), reason="a later version of Lightning has it")
@pytest.mark.parametrize("name", ["ddp_custom", "fsdp_custom", "tp_custom"])
@pytest.mark.filterwarnings("ignore:You.re using the WeightAveraging callback")
def test_a_module_that_is_built_late_is_averaged(name: str) -> None:
    """The callback copies the module before it is set up."""
    found, expected = (
        fit_module(BuiltLate, each, 1, callbacks=[callbacks.EMAWeightAveraging()], max_epochs=2)
        for each in (name, "auto")
    )
    assert difference(found, expected) <= TOLERANCE


@pytest.mark.parametrize("name", ["ddp_custom", "fsdp_custom"])
def test_pruning(name: str) -> None:
    prune = functools.partial(callbacks.ModelPruning, "l1_unstructured", amount=0.3)
    found, expected = (fit_module(ByteGPT, each, 1, callbacks=[prune()], max_epochs=2) for each in (name, "auto"))
    assert difference(found, expected) <= TOLERANCE
    assert sum(int((value == 0).sum()) for value in expected.values()) > 100


# Copies ---------------------------------------------------------------------------------------------------------------


class Copies(Callback):
    """Copies the module in hooks, and lets the copy compute."""

    def __init__(self, copied: Callable[[Any], Any]) -> None:
        self.copied = copied
        self.count = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.compare(pl_module)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        self.compare(pl_module)

    def compare(self, module: Any) -> None:
        tokens = next(iter(loader(1, 1)))
        twin = self.copied(module)
        assert {type(parameter) for parameter in twin.parameters()} == {nn.Parameter}
        assert all(own is not other for own, other in zip(module.parameters(), twin.parameters(), strict=True))
        with torch.no_grad():
            assert torch.equal(twin.loss(*tokens), module.loss(*tokens))
        self.count += 1


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
@pytest.mark.parametrize("name", ALONE)
def test_a_module_is_copied_during_a_fit(name: str, copied: Callable[[Any], Any]) -> None:
    trainer_for(name, 1, callbacks=[copies := Copies(copied)]).fit(ByteGPT(), loader(1, 2))
    assert copies.count == 3


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
@pytest.mark.parametrize("name", PRESETS)
def test_a_trainer_is_copied_before_and_after_a_fit(name: str, copied: Callable[[Any], Any]) -> None:
    weights = []
    trainer = trainer_for(name, 1, precision="bf16-mixed")
    for each in (copied(trainer), trainer):
        L.seed_everything(3, verbose=False)
        each.fit(module := ByteGPT(), loader(1, 2))
        weights.append({key: value.clone() for key, value in module.state_dict().items()})
    assert difference(*weights) == 0
    assert type(copied(trainer).strategy) is type(trainer.strategy)
    assert type(copied(trainer).precision_plugin) is type(trainer.precision_plugin)


class CopiesTrainer(Callback):
    """Copies the trainer while it trains, as a callback that keeps its arguments does."""

    def __init__(self) -> None:
        self.copies: list[Any] = []

    def copied(self, trainer: L.Trainer, *args: Any) -> None:
        copies, self.copies = self.copies, []
        self.copies = [*copies, copy.deepcopy(trainer)]

    on_train_start = on_train_batch_start = on_before_optimizer_step = copied
    on_train_batch_end = on_train_epoch_end = on_train_end = copied


@pytest.mark.parametrize("name", ALONE)
def test_a_trainer_is_copied_during_a_fit(name: str) -> None:
    trainer = trainer_for(name, 1, callbacks=[kept := CopiesTrainer()])
    trainer.fit(module := ByteGPT(), loader(1, 2))
    assert [each.global_step for each in kept.copies] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    last = kept.copies[-1]
    assert difference(dict(last.lightning_module.state_dict()), dict(module.state_dict())) == 0
    assert last.validate(last.lightning_module, loader(1, 2), verbose=False) == trainer.validate(
        module, loader(1, 2), verbose=False
    )


class Collating(ByteGPT):
    """Makes its batches itself, in a process that is not forked from this one."""

    def __init__(self) -> None:
        super().__init__("sgd")
        self.scale = 1

    def collate(self, samples: list[tuple[Tensor]]) -> list[Tensor]:
        return [torch.stack([tokens for (tokens,) in samples]) * self.scale]

    def train_dataloader(self) -> Any:
        context = multiprocessing.get_context("spawn")
        data = loader(1, 2).dataset
        return DataLoader(
            data,
            batch_size=8,
            collate_fn=self.collate,
            num_workers=1,
            persistent_workers=True,
            multiprocessing_context=context,
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp_custom", "fsdp_custom"])
def test_workers_that_are_spawned_take_a_method_of_the_module(name: str) -> None:
    L.seed_everything(3, verbose=False)
    trainer_for(name, 1).fit(module := Collating())
    L.seed_everything(3, verbose=False)
    trainer_for("auto", 1).fit(plain := ByteGPT("sgd"), loader(1, 2))
    assert difference(dict(module.state_dict()), dict(plain.state_dict())) <= TOLERANCE

"""Fits of modules that train, or are refused, as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader, TensorDataset

import lightning_parallel
from lightning_parallel import full_state_dict
from tests.data import GLOBAL_BATCH, loader, loader_of
from tests.jobs.lifecycle import Weights
from tests.models.cases import CASES, VOCABULARY, ByteGPT
from tests.models.unusual import RunsOnOneRank
from tests.parity import trainer_for


def fit_module(make: Callable[[], L.LightningModule], strategy: str, num_ranks: int, **kwargs: Any) -> Weights:
    """Four steps of any module; its weights."""
    L.seed_everything(3, verbose=False)
    module = make()
    trainer = trainer_for(strategy, num_ranks, **kwargs)
    trainer.fit(module, loader(num_ranks))
    return full_state_dict(trainer)


def state_in_hooks(strategy: str, num_ranks: int) -> dict[str, Any]:
    """`full_state_dict` in the middle of training, while validation parameters may be gathered."""
    found: dict[str, Any] = {}

    class Look(Callback):
        def look(self, trainer: L.Trainer, name: str) -> None:
            found[f"{name} {trainer.global_step}"] = full_state_dict(trainer)

        def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
            self.look(trainer, "train")

        def on_validation_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
            self.look(trainer, "validation")

        def on_validation_epoch_end(self, trainer: L.Trainer, *args: Any) -> None:
            self.look(trainer, "validation end")

    L.seed_everything(3, verbose=False)
    module = CASES["hf_gpt2"]("sgd")
    trainer = trainer_for(strategy, num_ranks, callbacks=[Look()])
    trainer.fit(module, loader(num_ranks, 2), loader(num_ranks, 1))
    found["after"] = full_state_dict(trainer)
    return found


def accumulated(strategy: str, num_ranks: int, case: str, accumulate: int) -> Weights:
    """Two optimizer steps of `accumulate` microsteps each."""
    L.seed_everything(3, verbose=False)
    module = CASES[case]("sgd")
    batch = GLOBAL_BATCH // accumulate
    trainer = trainer_for(strategy, num_ranks, accumulate_grad_batches=accumulate)
    trainer.fit(module, loader_of(case, steps=2 * accumulate, global_batch=batch, num_ranks=num_ranks))
    return full_state_dict(trainer)


def unused_everywhere(strategy: str, num_ranks: int) -> Weights:
    """A head that no step uses: it keeps no gradient, and AdamW does not decay it."""

    class Module(ByteGPT):
        def __init__(self) -> None:
            super().__init__("adamw")
            self.unused = nn.Linear(4, 4)

    return fit_module(Module, strategy, num_ranks)


def used_on_one_rank(strategy: str, num_ranks: int) -> Weights:
    """Even tokens first on rank 0, odd ones on rank 1."""
    L.seed_everything(3, verbose=False)
    tokens = torch.randint(0, VOCABULARY, (8, 16), generator=torch.Generator().manual_seed(0))
    tokens[:, 0] = torch.arange(8) % 2
    module = RunsOnOneRank("sgd")
    trainer = trainer_for(strategy, num_ranks)
    trainer.fit(module, DataLoader(TensorDataset(tokens), batch_size=1))
    return full_state_dict(trainer)


def messages(function: Callable[..., Any], *args: Any) -> list[str]:
    """What the package refuses with on this rank."""
    try:
        function(*args)
    except lightning_parallel.ConfigurationError as error:
        return list(error.violations)
    return []


def fit_and_validate(make: Callable[[], L.LightningModule], strategy: str, num_ranks: int) -> Weights:
    """Four steps with validation in between; the weights."""
    L.seed_everything(3, verbose=False)
    trainer = trainer_for(strategy, num_ranks, val_check_interval=2)
    trainer.fit(make(), loader(num_ranks), loader(num_ranks, 1))
    return full_state_dict(trainer)


def averaging(strategy: str, num_ranks: int) -> None:
    from lightning.pytorch.callbacks import StochasticWeightAveraging

    trainer_for(strategy, num_ranks, callbacks=[StochasticWeightAveraging(0.1)]).fit(ByteGPT(), loader(num_ranks))


def note_of(make: Callable[[], L.LightningModule], strategy: str, num_ranks: int) -> str:
    """The error of a fit, with its notes."""
    try:
        fit_module(make, strategy, num_ranks)
    except Exception as error:
        return "\n".join([str(error), *getattr(error, "__notes__", [])])
    return ""


def too_large_to_be_whole(num_ranks: int, path: str) -> dict[str, Any]:
    """A module that stays sharded after `fit`: what still works with it, and what is refused."""
    L.seed_everything(3, verbose=False)
    module = ByteGPT("adamw")
    with mock.patch("lightning_parallel.strategies.parallel_module.host_memory", return_value=1):
        trainer = trainer_for("fsdp_custom", num_ranks)
        trainer.fit(module, loader(num_ranks))
        found: dict[str, Any] = {"first": full_state_dict(trainer)}
        trainer.save_checkpoint(path)
        found["sharded"] = isinstance(module, FSDPModule), type(module).__name__
        validated = trainer_for("fsdp_custom", num_ranks)
        found["validated"] = validated.validate(module, loader(num_ranks, 1), verbose=False)
        others = ("ddp_custom", "zero2_custom", "tp_custom", "fsdp_custom:recompute=full")
        found["refused"] = {name: messages(trainer_for(name, num_ranks).fit, module, loader(1)) for name in others}
    again = trainer_for("fsdp_custom", num_ranks)
    again.fit(module, loader(num_ranks))
    found["second"] = full_state_dict(again)
    found["plain"] = isinstance(module, FSDPModule), type(module).__name__
    return found

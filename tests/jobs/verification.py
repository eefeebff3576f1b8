"""Runs of modules of the tests, as a verification makes them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L

from lightning_parallel import build_strategy
from lightning_parallel.verification.records import Record
from lightning_parallel.verification.runs import Parts, run_recorded, run_reference
from tests.data import batches
from tests.models.tables import MODULES
from tests.parity import make_trainer

UPDATES = 3


def parts_of(
    make: Callable[[], L.LightningModule],
    loaders: dict[str, Any],
    strategy: str,
    num_ranks: int,
    *,
    callbacks: list[Any],
    longer: int = 1,
    **kwargs: Any,
) -> Parts:
    """The parts of a run in fp64."""
    L.seed_everything(3, verbose=False)
    windows = kwargs.pop("accumulate_grad_batches", 1) * longer
    if windows > 1:
        kwargs["accumulate_grad_batches"] = windows
    module = make()
    if module.automatic_optimization:
        kwargs.setdefault("gradient_clip_val", 0.05)
    trainer = make_trainer(
        "auto" if strategy == "auto" else build_strategy(strategy),
        num_ranks,
        callbacks=callbacks,
        max_steps=UPDATES,
        precision="64-true",
        **kwargs,
    )
    return Parts(trainer, module, loaders=loaders)


def recorded(
    make: Callable[[], L.LightningModule],
    case: str,
    strategy: str,
    num_ranks: int,
    readers: int,
    folder: Path,
    **kwargs: Any,
) -> Record:
    """A rank's record."""
    loaders = {"fit": batches(case, readers)}
    given = f"{strategy}{',' if ':' in strategy else ':'}check=first_step"
    return run_recorded(functools.partial(parts_of, make, loaders, given, num_ranks, **kwargs), folder)


def in_one_process(make: Callable[[], L.LightningModule], records: list[Record], **kwargs: Any) -> Record:
    """The record of one process on the same batches."""
    return run_reference(functools.partial(parts_of, make, {}, "auto", 1, **kwargs), records)


def module_of(case: str, optimizer: str = "adamw") -> Callable[[], L.LightningModule]:
    """Makes a module of the tables."""
    return functools.partial(MODULES[case], optimizer)

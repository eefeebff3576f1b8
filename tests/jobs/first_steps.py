"""Fits whose first step is compared with one process, and what they say of it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
import torch.distributed as dist

from lightning_parallel import FirstStepError, build_strategy, full_state_dict
from lightning_parallel.strategies import compared_strategy, first_step, planned_strategy
from tests.data import batches
from tests.parity import Outcome, make_trainer, train_module

SAYS = "first step"


@contextmanager
def compared(check: str = "first_step") -> Iterator[None]:
    """Let every strategy compare its first step, whatever it was given."""
    make = functools.partial(_first_step, check)
    with mock.patch.object(planned_strategy, "FirstStep", make):
        yield


def _first_step(check: str, strategy: planned_strategy.PlannedStrategy, _: str) -> first_step.FirstStep:
    return first_step.FirstStep(strategy, check)


@contextmanager
def said(*begins: str) -> Iterator[list[str]]:
    """The lines that are said and begin so; those of the first step without any."""
    lines: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage().startswith(begins or SAYS):
                lines.append(record.getMessage())

    logger, handler = logging.getLogger("lightning.pytorch.utilities.rank_zero"), Handler()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def fit(
    make: Callable[[], L.LightningModule],
    case: str,
    strategy: str,
    num_ranks: int,
    readers: int,
    check: str = "first_step",
    **kwargs: object,
) -> tuple[Outcome, list[str]]:
    """Train; return the outcome, and what was said of the first step."""
    with said() as lines, compared(check):
        outcome = train_module(make, batches(case, readers), strategy, num_ranks, **kwargs)  # type: ignore[arg-type]
    return outcome, lines


def fit_with_room(room: float, *args: Any, **kwargs: Any) -> tuple[Outcome, list[str]]:
    """As `fit` with ``check="auto"``, where a copy may have as many bytes as `room` times the parameters.

    Args:
        room: Their part.
        args: Of `fit`, of which the first makes the module.
        kwargs: Of `fit`.
    """
    with little_memory(room, args[0]):
        return fit(*args, check="auto", **kwargs)


@contextmanager
def little_memory(room: float, make: Callable[[], L.LightningModule]) -> Iterator[None]:
    """Let a copy have as many bytes as `room` times the parameters of what `make` makes."""
    sizes = [parameter.numel() * parameter.itemsize for parameter in make().parameters()]
    free = int(room * sum(sizes)) * compared_strategy._COPIES * 2 * dist.get_world_size()
    with mock.patch.object(compared_strategy, "free_memory", return_value=free):
        yield


def ends_before_an_update(
    make: Callable[[], L.LightningModule], strategy: str, check: str = "first_step", **kwargs: object
) -> str:
    """The words of the error with which a fit ends; its weights are then those of before."""
    module = make()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with compared(check):
        trainer = make_trainer(build_strategy(strategy), 2, **kwargs)
    with pytest.raises(FirstStepError) as caught:
        trainer.fit(module, batches("byte_gpt", 1))
    assert trainer.global_step == 0
    after = full_state_dict(trainer)
    assert all(torch.equal(value, before[name]) for name, value in after.items())
    assert after or dist.get_rank() != 0
    return str(caught.value)

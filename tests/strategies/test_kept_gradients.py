"""Hooks that look for gradients in the middle of an accumulation window, where each rank keeps its own."""

from __future__ import annotations

import warnings
from typing import Any

import lightning as L
import pytest
from torch import Tensor

from lightning_parallel import full_state_dict
from tests.data import loader
from tests.models.cases import ByteGPT
from tests.names import num_readers
from tests.parity import TOLERANCE, difference, trainer_for

BEGIN = "p.grad is None at "


class Looks(ByteGPT):
    """Notes the norm of the gradients that are there behind each batch, as code that logs it does."""

    def __init__(self) -> None:
        super().__init__("adamw")
        self.model.blocks[0].requires_grad_(False)
        self.seen: list[int] = []

    def on_train_batch_end(self, *args: Any) -> None:
        trained = [p for p in self.parameters() if p.requires_grad]
        self.seen.append(sum(p.grad is not None for p in trained))


class LooksAtOne(Looks):
    """Looks where there is nothing to find: at frozen parameters."""

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen.append(sum(p.grad is not None for p in self.model.blocks[0].parameters()))


class LooksAtOnce(Looks):
    """Looks behind each backward, where gradients are reduced."""

    def on_train_batch_end(self, *args: Any) -> None:
        """Nothing."""

    def on_after_backward(self) -> None:
        Looks.on_train_batch_end(self)


def said_of(make: Any, strategy: str, num_ranks: int) -> tuple[list[str], list[int]]:
    L.seed_everything(3, verbose=False)
    module = make()
    trainer = trainer_for(strategy, num_ranks, accumulate_grad_batches=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, loader(num_readers(strategy.partition(":")[0], num_ranks), 4))
    return [text for each in caught if (text := str(each.message)).startswith(BEGIN)], module.seen


@pytest.mark.parametrize("strategy", ["fsdp_custom", "zero2_custom"])
def test_a_gradient_that_is_kept_is_told_of_once(ranks: Any, strategy: str) -> None:
    lines, seen = ranks(2).run(said_of, Looks, f"{strategy}:accumulation_sync=last", 2)[0]
    assert seen[0] == 0
    assert len(lines) == 1
    assert "test_kept_gradients.py:" in lines[0]
    assert "on_before_optimizer_step" in lines[0]


@pytest.mark.parametrize(
    ("make", "strategy"),
    [
        (Looks, "fsdp_custom:accumulation_sync=every"),
        (LooksAtOnce, "fsdp_custom:accumulation_sync=auto"),
        (LooksAtOne, "fsdp_custom:accumulation_sync=last"),
        (Looks, "ddp_custom"),
    ],
)
def test_nothing_is_said_where_they_are_as_in_one_process(ranks: Any, make: Any, strategy: str) -> None:
    lines, seen = ranks(2).run(said_of, make, strategy, 2)[0]
    plain = said_of(make, "auto", 1)[1]
    assert lines == []
    assert seen == plain


class Clears(ByteGPT):
    """Forgets the first microstep of each window."""

    def __init__(self) -> None:
        super().__init__("adamw")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % 4 == 0:
            for parameter in self.parameters():
                parameter.grad = None


def cleared(strategy: str, num_ranks: int) -> dict[str, Tensor]:
    L.seed_everything(3, verbose=False)
    trainer = trainer_for(strategy, num_ranks, accumulate_grad_batches=4)
    trainer.fit(Clears(), loader(1 if strategy == "auto" else num_ranks, 8))
    return full_state_dict(trainer)


@pytest.mark.parametrize("mode", ["last", "every"])
@pytest.mark.parametrize("name", ["fsdp_custom", "zero2_custom"])
def test_a_gradient_that_is_kept_can_be_cleared(ranks: Any, name: str, mode: str) -> None:
    found = ranks(2).run(cleared, f"{name}:accumulation_sync={mode}", 2)[0]
    assert difference(found, cleared("auto", 1)) < TOLERANCE


def test_training_that_never_looks_is_silent(ranks: Any) -> None:
    assert ranks(2).run(told_without_a_look, 2)[0] == []


def told_without_a_look(num_ranks: int) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = trainer_for("fsdp_custom:accumulation_sync=last", num_ranks, accumulate_grad_batches=2)
        trainer.fit(ByteGPT("adamw"), loader(num_ranks, 4))
    return [str(each.message) for each in caught if str(each.message).startswith(BEGIN)]

"""Losses that layers put into arguments, variables and their model: those of one process, or refused."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest

from lightning_parallel import ConfigurationError
from tests.data import batches
from tests.jobs.first_steps import said
from tests.models.leaving_layers import LEAVING, OfCounting, OfCountingLater, OfKeptLength
from tests.parity import TOLERANCE, Outcome, checked, is_moving, once, train_module, trainer_for, worst

EVERYWHERE = ["list", "list_by_name", "numbers", "dict", "nested", "record", "model", "numbers_of_model", "attribute"]
SINGLE = "object", "file"
"""Which only ranks that run all layers find."""
RUNNING = [
    *((name, strategy, 2, readers) for strategy, readers in (("ddp_custom", 2), ("fsdp_custom", 2), ("tp_custom", 1))
      for name in (*EVERYWHERE, *SINGLE)),
    *((name, "pp_custom", 2, 1) for name in EVERYWHERE if name != "record"),
    *((name, "pp_custom:schedule=turns", 2, 1) for name in EVERYWHERE),
    *((name, strategy, 2, readers) for strategy, readers in (("fsdp_custom", 2), ("tp_custom", 1), ("pp_custom", 1))
      for name in ("popped", "popped_of_two", "popped_by_key")),
    *((name, "fsdp_custom", 2, 2) for name in ("twice", "long")),
    ("long", "pp_custom", 2, 1),
    *((name, "fsdp_custom:pipeline=2,shard=2", 4, 2) for name in ("list", "dict", "model", "popped")),
    *((name, "fsdp_tp_custom", 4, 2) for name in ("list", "record", "file")),
]  # fmt: skip


def trained(name: str, strategy: str, num_ranks: int, readers: int) -> Outcome:
    own = strategy if strategy == "auto" else checked(strategy)
    return train_module(LEAVING[name], batches("byte_gpt", readers, 3), own, num_ranks)


@pytest.mark.parametrize(("name", "strategy", "size", "readers"), RUNNING)
def test_losses_that_layers_leave_are_found(ranks: Any, name: str, strategy: str, size: int, readers: int) -> None:
    alone = once(trained, name, "auto", 1, 1)
    assert is_moving(alone)
    assert worst(ranks(size).run(trained, name, strategy, size, readers)[0], alone) < TOLERANCE


def refusal(name: str, strategy: str) -> str:
    with pytest.raises(ConfigurationError) as caught:
        trained(name, strategy, 2, 1)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "kinds"),
    [("list", "a list"), ("list_by_name", "a list"), ("dict", "a dict"), ("nested", "a dict and a list")],
)
def test_a_part_of_a_sequence_has_a_part_of_a_loss(ranks: Any, name: str, kinds: str) -> None:
    for message in ranks(2).run(refusal, name, "cp_custom"):
        assert f"model.blocks.0 (Layer) changes an argument, {kinds}, in which it puts what a rank computes" in message
        assert "context=1" in message


@pytest.mark.parametrize("name", SINGLE)
def test_what_a_stage_cannot_be_sent_is_refused(ranks: Any, name: str) -> None:
    for message in ranks(2).run(refusal, name, "pp_custom"):
        assert "takes something that only another pipeline stage computes" in message


def counted(make: Any, strategy: str, num_ranks: int, readers: int) -> tuple[Outcome, list[str]]:
    own = strategy if strategy == "auto" else checked(strategy)
    with said("") as lines:
        outcome = train_module(make, batches("byte_gpt", readers, 3), own, num_ranks)
    return outcome, [line for line in lines if "take turns" in line]


@pytest.mark.parametrize(
    ("strategy", "size", "readers"),
    [("fsdp_custom", 2, 2), ("tp_custom", 2, 1), ("pp_custom", 2, 1), ("fsdp_custom:pipeline=2,shard=2", 4, 2)],
)
@pytest.mark.parametrize(("make", "name"), [(OfCounting, "num_calls"), (OfCountingLater, "count")])
def test_layers_count_steps(ranks: Any, make: Any, name: str, strategy: str, size: int, readers: int) -> None:
    found, lines = ranks(size).run(counted, make, strategy, size, readers)[0]
    assert worst(found, once(counted, make, "auto", 1, 1)[0]) < TOLERANCE
    assert len(lines) == ("pipeline" in strategy or strategy == "pp_custom")
    assert all(f"model.blocks.0, or a hook in it, changes model.blocks.0.{name} in each run" in line for line in lines)


def test_a_number_that_stays_is_no_count(ranks: Any) -> None:
    found, lines = ranks(2).run(counted, OfKeptLength, "pp_custom", 2, 1)[0]
    assert worst(found, once(counted, OfKeptLength, "auto", 1, 1)[0]) < TOLERANCE
    assert not lines


def validated(name: str, strategy: str, num_ranks: int) -> float:
    """Of an evaluation before training, in which nothing is compared."""
    L.seed_everything(3, verbose=False)
    trainer = trainer_for(strategy, num_ranks)
    return float(trainer.validate(LEAVING[name](), batches("byte_gpt", 1, 2), verbose=False)[0]["val_loss"])


@pytest.mark.parametrize("strategy", ["pp_custom", "pp_custom:schedule=turns", "tp_custom"])
@pytest.mark.parametrize("name", ["popped", "popped_of_two", "popped_by_key", "dict", "long"])
def test_losses_that_layers_leave_in_evaluations(ranks: Any, name: str, strategy: str) -> None:
    found = ranks(2).run(validated, name, strategy, 2)
    assert found == pytest.approx([once(validated, name, "auto", 1)] * 2, rel=TOLERANCE)


class OnlyThroughLosses(LEAVING["list"]):  # type: ignore[misc]
    """The last layer is reached by what it has left alone."""

    def loss(self, tokens: Any) -> Any:
        losses: list[Any] = []
        x = self.model.tokens(tokens)
        for block in self.model.blocks:
            x = block(x, losses)
        return sum(losses)


@pytest.mark.parametrize("strategy", ["fsdp_custom", "fsdp_custom:reshard=never", "zero2_custom"])
def test_backward_reaches_a_unit_through_what_it_has_left(ranks: Any, strategy: str) -> None:
    found = ranks(2).run(through_losses, strategy, 2, 2)[0]
    assert worst(found, once(through_losses, "auto", 1, 1)) < TOLERANCE


def through_losses(strategy: str, num_ranks: int, readers: int) -> Outcome:
    own = strategy if strategy == "auto" else checked(strategy)
    return train_module(OnlyThroughLosses, batches("byte_gpt", readers, 3), own, num_ranks)

"""Losses that layers put into arguments, variables and their model: those of one process, or refused."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_parallel import ConfigurationError
from tests.data import batches
from tests.jobs.first_steps import said
from tests.models.leaving_layers import LEAVING, OfCounting, OfCountingLater, OfKeptLength
from tests.parity import TOLERANCE, Outcome, checked, is_moving, once, train_module, worst

EVERYWHERE = ["list", "list_by_name", "numbers", "dict", "nested", "record", "model", "numbers_of_model", "attribute"]
SINGLE = "object", "file"
"""Which only ranks that run all layers find."""
RUNNING = [
    *((name, strategy, 2, readers) for strategy, readers in (("ddp_custom", 2), ("fsdp_custom", 2), ("tp_custom", 1))
      for name in (*EVERYWHERE, *SINGLE)),
    *((name, "pp_custom", 2, 1) for name in EVERYWHERE if name != "record"),
    *((name, "pp_custom:schedule=turns", 2, 1) for name in EVERYWHERE),
    *((name, "fsdp_custom:pipeline=2,shard=2", 4, 2) for name in ("list", "dict", "model")),
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
    assert all(f"model.blocks.0, or a hook in it, changes model.blocks.0.{name}, a number" in line for line in lines)


def test_a_number_that_stays_is_no_count(ranks: Any) -> None:
    found, lines = ranks(2).run(counted, OfKeptLength, "pp_custom", 2, 1)[0]
    assert worst(found, once(counted, OfKeptLength, "auto", 1, 1)[0]) < TOLERANCE
    assert not lines

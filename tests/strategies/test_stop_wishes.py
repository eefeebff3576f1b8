"""`trainer.should_stop` that some ranks set ends training on all of them behind the same batch."""

from __future__ import annotations

import functools
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor

from lightning_parallel import full_state_dict
from tests.data import loader
from tests.models.cases import ByteGPT
from tests.names import num_readers
from tests.parity import TOLERANCE, difference, trainer_for

NAMES = ["ddp_custom", "fsdp_custom", "pp_custom"]


class Stops(ByteGPT):
    """Ends the training.

    Args:
        place: Where it sets it.
        batch: In which batch of the first epoch, if it does so in a step.
        ranks: The ranks that do so.
    """

    def __init__(self, place: str, batch: int, ranks: tuple[int, ...]) -> None:
        super().__init__("sgd")
        self.place, self.batch, self.ranks = place, batch, ranks
        self.num_validations = 0

    def stop(self, place: str, batch: int | None = None) -> None:
        if place == self.place and batch in (None, self.batch) and self.global_rank in self.ranks:
            self.trainer.should_stop = True

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.stop("step", batch_idx)
        loss = super().training_step(batch, batch_idx)
        self.stop("loss", batch_idx)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.stop("batch", batch_idx)

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.num_validations += 1
            self.stop("validation")

    def on_train_epoch_end(self) -> None:
        self.stop("epoch")


def trained(
    strategy: str, num_ranks: int, place: str, batch: int, ranks: tuple[int, ...], readers: int = 0, **kwargs: Any
) -> tuple[int, int, int, dict[str, Tensor]]:
    """Updates, epochs, validations and weights."""
    L.seed_everything(3, verbose=False)
    readers = readers or (num_readers(strategy.partition(":")[0], num_ranks) if num_ranks > 1 else 1)
    trainer = trainer_for(strategy, num_ranks, max_epochs=3, **kwargs)
    module = Stops(place, batch, ranks)
    trainer.fit(module, loader(readers), loader(readers, 2))
    return trainer.global_step, trainer.current_epoch, module.num_validations, full_state_dict(trainer)


@functools.cache
def alone(place: str, batch: int, **kwargs: Any) -> Any:
    return trained("auto", 1, place, batch, (0,), **kwargs)


def assert_equal(found: Any, expected: Any) -> None:
    for each in found:
        assert each[:3] == expected[:3]
    assert difference(found[0][3], expected[3]) <= TOLERANCE


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("place", ["step", "batch"])
def test_one_rank_stops_in_a_batch(name: str, place: str, ranks: Any) -> None:
    """Others may have begun the next one, which is the last one then."""
    found = ranks(2).run(trained, name, 2, place, 1, (1,), deadline=60)
    steps = {each[0] for each in found}
    assert len(steps) == 1
    assert steps <= {2, 3}
    assert_equal(found, alone(place, steps.pop() - 1))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("place", ["validation", "epoch"])
def test_one_rank_stops_at_the_end_of_an_epoch(name: str, place: str, ranks: Any) -> None:
    assert_equal(ranks(2).run(trained, name, 2, place, 0, (0,), deadline=60), alone(place, 0))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kwargs", [{}, {"accumulate_grad_batches": 2}, {"min_epochs": 2}], ids=str)
def test_all_ranks_stop_where_they_say(name: str, kwargs: dict[str, Any], ranks: Any) -> None:
    found = ranks(2).run(trained, name, 2, "batch", 2, (0, 1), **kwargs, deadline=60)
    assert_equal(found, alone("batch", 2, **kwargs))


@pytest.mark.parametrize("name", [*NAMES, "tp_custom", "cp_custom", "pp_custom:schedule=turns", "pp_custom:loss=batch"])
@pytest.mark.parametrize("place", ["step", "loss"])
def test_all_ranks_stop_in_a_step(name: str, place: str, ranks: Any) -> None:
    """Behind the loss, too, where a pipeline has its last stage only."""
    found = ranks(2).run(trained, name, 2, place, 1, (0, 1), deadline=60)
    assert_equal(found, alone(place, 1))


@pytest.mark.parametrize(("name", "readers"), [("fsdp_custom:pipeline=2", 2), ("tp_custom:tensor=2,pipeline=2", 1)])
def test_stages_stop_in_a_step(name: str, readers: int, ranks: Any) -> None:
    assert_equal(ranks(4).run(trained, name, 4, "loss", 1, (0, 1, 2, 3), readers, deadline=60), alone("loss", 1))


def stopped_early(strategy: str, num_ranks: int) -> int:
    early = EarlyStopping("value", patience=0, min_delta=1e9)
    trainer = trainer_for(strategy, num_ranks, max_epochs=5, callbacks=[early])
    trainer.fit(Logs(), loader(num_ranks), loader(num_ranks, 2))
    return trainer.global_step


class Logs(ByteGPT):
    """Logs what it stops by."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("value", batch[0].float().mean(), sync_dist=True)


def test_early_stopping_needs_nobody(ranks: Any) -> None:
    assert ranks(2).run(stopped_early, "ddp_custom", 2, deadline=60) == [stopped_early("auto", 1)] * 2

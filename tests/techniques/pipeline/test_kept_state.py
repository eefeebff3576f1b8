"""Steps that keep something for later, under a pipeline: once a step, on all ranks, and as one process has it."""

from __future__ import annotations

from typing import Any
from unittest import mock

import lightning as L
import pytest

from lightning_parallel import full_state_dict
from lightning_parallel.module import written_state
from lightning_parallel.strategies import loss_choice
from tests.data import batches, loader
from tests.models.containers import Collects
from tests.models.stateful import (
    KEEPING,
    CachesMask,
    CarriesSamples,
    CollectsOutputs,
    ComparesWithLast,
    CountsSteps,
    MakesLists,
)
from tests.parity import TOLERANCE, Outcome, once, train_module, trainer_for, worst
from tests.rank_pool import RankError

NAMES = [("pp_custom", 2), ("fsdp_custom:pipeline=2", 2), ("pp_custom:schedule=gpipe,microbatches=2", 2)]


def fit(kept: str, strategy: str, num_ranks: int) -> Outcome:
    return train_module(KEEPING[kept], batches("byte_gpt", 1), strategy, num_ranks)


@pytest.mark.parametrize(("name", "size"), NAMES)
@pytest.mark.parametrize("kept", KEEPING)
def test_once_a_step(ranks: Any, kept: str, name: str, size: int) -> None:
    assert worst(ranks(size).run(fit, kept, name, size)[0], once(fit, kept, "auto", 1)) < TOLERANCE


def collected(strategy: str, num_ranks: int, make: Any = CollectsOutputs) -> tuple[list[float], dict[str, Any]]:
    """The means that a module takes of all its outputs, on this rank."""
    L.seed_everything(3, verbose=False)
    module = make()
    trainer = trainer_for(strategy, num_ranks, max_epochs=2)
    trainer.fit(module, loader(1), loader(1, 2))
    return module.means, full_state_dict(trainer)


@pytest.mark.parametrize("name", ["pp_custom", "pp_custom:loss=batch"])
def test_outputs_of_an_epoch_are_those_of_one_process_on_all_ranks(ranks: Any, name: str) -> None:
    expected, _ = once(collected, "auto", 1)
    for means, _ in ranks(2).run(collected, name, 2):
        assert means == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", ["pp_custom", "pp_custom:loss=batch", "pp_custom:schedule=turns"])
def test_what_is_new_in_a_step_is_there_in_hooks_of_all_ranks(ranks: Any, name: str) -> None:
    expected, _ = once(collected, "auto", 1, MakesLists)
    for means, _ in ranks(2).run(collected, name, 2, MakesLists):
        assert means == pytest.approx(expected, rel=1e-5)


def in_containers(strategy: str, num_ranks: int) -> dict[str, Any]:
    """What a module has collected in containers of containers and in objects, on this rank."""
    module = Collects()
    trainer_for(strategy, num_ranks).fit(module, loader(1), loader(1, 2))
    return module.collected()


@pytest.mark.parametrize("name", ["pp_custom", "pp_custom:loss=batch"])
def test_containers_hold_what_they_hold_in_one_process(ranks: Any, name: str) -> None:
    """Nested ones too: a stage runs a step more often than once, and not all of it."""
    expected = once(in_containers, "auto", 1)
    assert ranks(2).run(in_containers, name, 2) == [expected, expected]


def numbers_of_steps(strategy: str, num_ranks: int) -> int:
    """What a module has counted, on this rank."""
    module = CountsSteps()
    trainer_for(strategy, num_ranks).fit(module, loader(1))
    return module.num_steps


def test_all_stages_count_alike(ranks: Any) -> None:
    assert ranks(2).run(numbers_of_steps, "pp_custom", 2) == [4, 4]


def kept_on_ranks(make: Any) -> tuple[Any, str]:
    """What a module keeps on this rank, and how its loss was computed."""
    module, said = make(), []
    with mock.patch.object(loss_choice, "rank_zero_info", said.append):
        trainer_for("pp_custom", 2).fit(module, loader(1))
    kept = getattr(module, "last", None)
    return None if kept is None else kept.sum().item(), " ".join(said)


def test_what_is_kept_is_on_all_ranks(ranks: Any) -> None:
    (first, said), (last, _) = ranks(2).run(kept_on_ranks, ComparesWithLast)
    assert first == pytest.approx(last, rel=1e-6)
    assert "the step changes last, as often as it runs" in said


def test_a_cache_is_nothing_that_is_kept(ranks: Any) -> None:
    """Its loss is computed for each microbatch, with less memory."""
    assert "runs for each microbatch" in ranks(2).run(kept_on_ranks, CachesMask)[0][1]


def test_samples_that_are_kept_do_not_fit_microbatches(ranks: Any) -> None:
    with pytest.raises(RankError, match="2 samples at a time, while states of an earlier step has those of all 8"):
        ranks(2).run(kept_on_ranks, CarriesSamples)


def large(kept: int) -> str:
    """How a value answers that is too large to be sent."""
    module = ComparesWithLast()
    with mock.patch.object(written_state, "_MOST", kept):
        trainer_for("pp_custom", 2).fit(module, loader(1))
    return repr(module.last)


def test_what_is_too_large_is_not_whole(ranks: Any) -> None:
    first, last = ranks(2).run(large, 100)
    assert first.startswith("Placeholder((8, 16, 32)")
    assert last.startswith("tensor(")

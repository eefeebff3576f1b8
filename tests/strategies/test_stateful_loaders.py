"""torchdata's `StatefulDataLoader`: a fit that is resumed reads what the one that was saved would have read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DistributedSampler

from lightning_parallel.strategies.restored_loaders import deal_states, state_entry, state_problem
from tests.jobs.positions import GLOBAL_BATCH, NUM_SAMPLES, Numbers, fit
from tests.names import num_readers

pytest.importorskip("torchdata")

STEPS = NUM_SAMPLES // GLOBAL_BATCH
"""Batches of an epoch."""
SAVES = (2, STEPS, STEPS + 2)
"""In the first epoch, behind its last batch, and in the second."""


@pytest.mark.parametrize("kind", ["torchdata", "torchdata shuffled"])
@pytest.mark.parametrize("name", ["ddp_custom", "fsdp_custom", "pp_custom"])
@pytest.mark.parametrize("save", SAVES)
def test_ranks(ranks: Any, tmp_path: Path, kind: str, name: str, save: int) -> None:
    """Also with another seed than that of the run that was saved."""
    path, readers = str(tmp_path / "a.ckpt"), num_readers(name, 2)
    whole = ranks(2).run(fit, name, readers, path, kind=kind, save=save)
    resumed = ranks(2).run(fit, name, readers, path, kind=kind, from_path=path)
    assert [rank["seen"] for rank in resumed] == [rank["seen"][save:] for rank in whole]
    assert not any(rank["told"] for rank in resumed)
    if readers == 2:
        first = [sample for rank in whole for epoch, _, batch in rank["seen"] if epoch == 0 for sample in batch]
        assert sorted(first) == list(range(NUM_SAMPLES))


@pytest.mark.parametrize("kind", ["torchdata workers", "torchdata workers shuffled"])
@pytest.mark.parametrize("name", ["ddp_custom", "dp_custom"])
@pytest.mark.parametrize("save", SAVES)
def test_workers(tmp_path: Path, kind: str, name: str, save: int) -> None:
    path = str(tmp_path / "a.ckpt")
    whole = fit(name, 1, path, kind=kind, save=save)
    resumed = fit(name, 1, path, kind=kind, from_path=path)
    assert resumed["told"] == []
    assert resumed["seen"] == whole["seen"][save:]
    assert len(resumed["seen"]) == 2 * STEPS - save


@pytest.mark.parametrize("kind", ["torchdata", "torchdata shuffled"])
def test_behind_a_limited_epoch_the_next_one_begins(ranks: Any, tmp_path: Path, kind: str) -> None:
    path = str(tmp_path / "a.ckpt")
    whole = ranks(2).run(fit, "ddp_custom", 2, path, kind=kind, save=4, limit_train_batches=4)
    resumed = ranks(2).run(fit, "ddp_custom", 2, path, kind=kind, from_path=path, limit_train_batches=4)
    assert [rank["seen"] for rank in resumed] == [rank["seen"][4:] for rank in whole]


def loader_with(sampler: Any) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(Numbers(), 2, sampler=sampler)


def test_the_seed_of_a_users_sampler_is_the_users() -> None:
    own, dealt = (loader_with(DistributedSampler(Numbers(), 2, 0, seed=seed)) for seed in (123, 3))
    deal_states(dealt, None)
    entries = [{**state_entry(each), "states": [{}, {}]} for each in (own, dealt)]
    assert ["seed" in each for each in entries] == [False, True]
    again = loader_with(DistributedSampler(Numbers(), 2, 0, seed=11))
    deal_states(again, {"epoch": 1, "loaders": entries})
    assert (again.sampler.seed, again.sampler.epoch) == (3, 1)


def test_a_checkpoint_that_does_not_say_the_order_is_told_of() -> None:
    dealt = loader_with(DistributedSampler(Numbers(), 2, 0))
    deal_states(dealt, None)
    assert "does not say in which order" in state_problem(dealt, {"kind": "state", "states": [{}, {}]}, 2)
    assert state_problem(dealt, {"kind": "state", "states": [{}, {}], "seed": 0}, 2) == ""
    assert "those of 2 data ranks, where 1 read now" in state_problem(dealt, {"states": [{}, {}], "seed": 0}, 1)

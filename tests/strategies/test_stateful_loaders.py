"""torchdata's `StatefulDataLoader`: a fit that is resumed reads what the one that was saved would have read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.jobs.positions import GLOBAL_BATCH, NUM_SAMPLES, fit
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

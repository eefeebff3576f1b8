"""Fits of modules whose hooks note what they see."""

from __future__ import annotations

from typing import Any
from unittest import mock

import lightning as L

from lightning_parallel import build_strategy, full_state_dict
from lightning_parallel.ranks import host_reads
from tests.data import GLOBAL_BATCH, loader_of
from tests.names import num_readers
from tests.parity import Outcome, Recorder, make_trainer

ALONE = 3.0
"""Seconds to wait for ranks that do not come."""


def seen_in_hooks(make: Any, strategy: str, num_ranks: int, readers: int = 0) -> tuple[list[Any], Outcome]:
    """What hooks have seen, and how training went."""
    module, outcome = run_hooks(make, strategy, num_ranks, readers, alone=ALONE)
    return module.seen, outcome


def words_in_hooks(make: Any, strategy: str, num_ranks: int) -> list[str]:
    """The refusals that hooks have caught, where ranks wait for a moment only."""
    module, _ = run_hooks(make, strategy, num_ranks, alone=0.3)
    return list(module.words)


def run_hooks(make: Any, strategy: str, num_ranks: int, readers: int = 0, *, alone: float) -> tuple[Any, Outcome]:
    """The module after three steps, and how they went."""
    L.seed_everything(3, verbose=False)
    module, recorder = make(), Recorder()
    built = strategy if strategy == "auto" else build_strategy(strategy)
    readers = readers or num_readers(strategy.partition(":")[0], num_ranks)
    loader = loader_of("byte_gpt", steps=3, global_batch=GLOBAL_BATCH, num_ranks=readers)
    with mock.patch.object(host_reads, "DEADLINE", alone):
        trainer = make_trainer(built, num_ranks, callbacks=[recorder])
        trainer.fit(module, loader)
    recorder.outcome.final = full_state_dict(trainer)
    return module, recorder.outcome

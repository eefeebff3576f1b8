"""Lightning's search for a learning rate: losses of its trial, and a module that is as before it."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.tuner import Tuner

from lightning_parallel import full_state_dict
from tests.data import batches
from tests.models.tables import MODULES
from tests.names import num_readers
from tests.parity import TOLERANCE, difference, largest, once, trainer_for

STEPS = 12


def searched(strategy: str, num_ranks: int, folder: str) -> tuple[list[float], dict[str, Any], dict[str, Any]]:
    """The losses of a search, and the weights after it and after a fit that follows."""
    L.seed_everything(3, verbose=False)
    module = MODULES["byte_gpt"]("sgd")
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    trainer = trainer_for(strategy, num_ranks, default_root_dir=folder, max_steps=3, max_epochs=None)
    loader = batches("byte_gpt", num_readers(strategy, num_ranks), STEPS)
    found = Tuner(trainer).lr_find(
        module, loader, num_training=STEPS, early_stop_threshold=None, max_lr=0.1, update_attr=False
    )
    assert found is not None
    assert all(torch.equal(module.state_dict()[name], tensor) for name, tensor in before.items())
    trainer.fit(module, loader)
    return found.results["loss"], before, full_state_dict(trainer)


@pytest.mark.parametrize("strategy", ["fsdp_custom", "zero1_custom", "tp_custom", "cp_custom", "pp_custom"])
def test_a_search_for_a_learning_rate_leaves_nothing(ranks: Any, tmp_path: Path, strategy: str) -> None:
    losses, _, expected = once(searched, "auto", 1, str(tmp_path))
    for ours, _, final in ranks(2).run(functools.partial(searched, strategy, 2), str(tmp_path)):
        if num_readers(strategy, 2) == 1:  # else a rank has the losses of its own samples, as under Lightning's DDP
            assert largest(abs(a - b) for a, b in zip(ours, losses, strict=True)) < TOLERANCE
        if final:  # on rank 0
            assert difference(final, expected) < TOLERANCE

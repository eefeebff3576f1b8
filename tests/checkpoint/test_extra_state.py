"""What layers keep in checkpoints besides parameters and buffers: that of the rank that runs the layer."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from lightning_parallel import full_state_dict
from tests.data import batches
from tests.models.extra_state import Counts, OfMeasures, OfVersions
from tests.parity import TOLERANCE, Recorder, largest, once, trainer_for

FORMS = "whole", "sharded"
STRATEGIES = [
    ("fsdp_custom", 2, 2),
    ("pp_custom", 2, 1),
    ("pp_custom:schedule=interleaved,virtual_stages=2", 2, 1),
    ("fsdp_custom:pipeline=2,shard=2", 4, 2),
    ("fsdp_custom:tensor=2,pipeline=2", 4, 1),
]


def saved_and_resumed(strategy: str, num_ranks: int, readers: int, file: str) -> tuple[Any, Any, dict[str, Any]]:
    """The layers' own state and the losses of an epoch, then of another one from its checkpoint, and the weights."""
    states, losses = [], []
    for epochs in (1, 2):
        L.seed_everything(3, verbose=False)
        module, recorder = Counts(), Recorder()
        module.file = file if epochs == 1 else ""
        trainer = trainer_for(strategy, num_ranks, max_epochs=epochs, callbacks=[recorder])
        trainer.fit(module, batches("byte_gpt", readers, 2), ckpt_path=file if epochs == 2 else None)
        states.append([(b.has_run, b.factor, b.scales.tolist()) for b in module.model.blocks])
        losses.append(recorder.outcome.losses)
    return states, losses, full_state_dict(trainer)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("strategy", "size", "readers"), STRATEGIES)
def test_extra_state_is_that_of_the_rank_that_runs_a_layer(
    ranks: Any, tmp_path: Path, strategy: str, size: int, readers: int, form: str
) -> None:
    one, many = str(tmp_path / "one.ckpt"), str(tmp_path / "many.ckpt")
    states, losses, weights = once(saved_and_resumed, "auto", 1, 1, one)
    name = f"{strategy}{',' if ':' in strategy else ':'}checkpoint={form}"
    found = ranks(size).run(saved_and_resumed, name, size, readers, many)
    for seen, ours, _ in found:
        assert seen == states
        assert largest(abs(a - b) for a, b in zip(chain(*ours), chain(*losses), strict=True)) < TOLERANCE
    ours = found[0][2]
    assert list(ours) == list(weights)
    for entry, value in weights.items():
        if isinstance(value, torch.Tensor):
            assert largest([(ours[entry] - value).abs().max()]) < TOLERANCE
        else:
            assert str(ours[entry]) == str(value), entry


def states_behind(make: Any, strategy: str, num_ranks: int) -> list[Any]:
    L.seed_everything(3, verbose=False)
    module = make()
    trainer_for(strategy, num_ranks).fit(module, batches("byte_gpt", 1, 2))
    return [block.get_extra_state() for block in module.model.blocks]


@pytest.mark.parametrize("make", [OfVersions, OfMeasures])
def test_extra_state_that_is_not_set_and_one_that_reads_weights(ranks: Any, make: Any) -> None:
    expected = once(states_behind, make, "auto", 1)
    for found in ranks(2).run(states_behind, make, "pp_custom", 2):
        assert [str(state.get("scales")) for state in found] == [str(state.get("scales")) for state in expected]
        for key in ("version", "has_run", "norm"):
            values = [state.get(key) for state in expected]
            assert [state.get(key) for state in found] == (
                pytest.approx(values) if key == "norm" and values[0] else values
            )

"""A NaN among the samples of one rank reaches the weights of all, as in one process; a step without a loss ends all."""

from __future__ import annotations

from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch

from lightning_parallel import full_state_dict
from lightning_parallel.strategies import failures
from tests.data import batches
from tests.jobs.lifecycle import Weights
from tests.models.not_numbers import NoLoss, NoNumber
from tests.names import num_readers
from tests.parity import TOLERANCE, once, trainer_for
from tests.rank_pool import RankError

NAMES = ("ddp_custom", "zero1_custom", "fsdp_custom", "tp_custom", "cp_custom", "pp_custom")


def fitted(make: Any, strategy: str, num_ranks: int, **kwargs: Any) -> Weights:
    """The weights after five batches, and the last norm of gradients, which a callback may look at."""
    L.seed_everything(3, verbose=False)
    trainer = trainer_for(strategy, num_ranks, **kwargs)
    trainer.fit(make("adamw"), batches("byte_gpt", num_readers(strategy.partition(":")[0], num_ranks)))
    return full_state_dict(trainer)


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("strategy", NAMES)
def test_a_nan_is_that_of_one_process(ranks: Any, strategy: str, clip: float | None) -> None:
    expected = once(fitted, NoNumber, "auto", 1, gradient_clip_val=clip)
    ours = ranks(2).run(fitted, NoNumber, strategy, 2, gradient_clip_val=clip)[0]
    assert any(value.isnan().any() for value in expected.values())
    for name, value in expected.items():
        torch.testing.assert_close(ours[name], value, atol=TOLERANCE, rtol=0, equal_nan=True)


def without_grace(strategy: str) -> None:
    """A rank that waits in a collective ends a moment after the error of another one."""
    with mock.patch.object(failures, "GRACE", 3.0):
        fitted(NoLoss, strategy, 2)


@pytest.mark.parametrize("strategy", NAMES)
def test_a_step_without_a_loss_ends_all_ranks(ranks: Any, strategy: str) -> None:
    words = "returns NoneType for a microbatch" if strategy == "pp_custom" else "Skipping the `training_step`"
    with pytest.raises(RankError) as caught:
        ranks(2).run(without_grace, strategy, deadline=40)
    assert words in str(caught.value)
    assert "was not done in time" not in str(caught.value)

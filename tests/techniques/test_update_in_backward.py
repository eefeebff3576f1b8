"""Optimizers that update each parameter as soon as its gradient is there."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest

from lightning_parallel import build_strategy, full_state_dict
from tests.data import loader_of
from tests.models.cases import CASES
from tests.parity import TOLERANCE, Recorder, difference, make_trainer


class Watching(Recorder):
    """How many gradients of sharded parameters exist when backward has ended."""

    gradients = 0

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self.gradients = max(self.gradients, sum(p.grad is not None for p in pl_module.parameters()))


def in_backward(case: str, name: str, num_ranks: int) -> tuple[dict[str, Any], int]:
    L.seed_everything(3, verbose=False)
    watching = Watching()
    strategy = name if name == "auto" else build_strategy(name)
    trainer = make_trainer(strategy, num_ranks, callbacks=[watching])
    trainer.fit(CASES[case]("adamw"), loader_of(case, steps=5, global_batch=8, num_ranks=num_ranks))
    return full_state_dict(trainer), watching.gradients


@pytest.mark.parametrize("case", ["byte_gpt", "bare_parameter", "hf_gpt2", "parameter_groups", "configure_model"])
@pytest.mark.parametrize("name", ["fsdp_custom", "zero2_custom"])
def test_update_in_backward(ranks: Any, name: str, case: str) -> None:
    ours, gradients = ranks(2).run(in_backward, case, f"{name}:optimizer_in_backward=true", 2)[0]
    theirs, all_gradients = in_backward(case, "auto", 1)
    assert difference(ours, theirs) < TOLERANCE
    assert gradients <= 1 < all_gradients  # a scalar stays whole, and is updated after backward


def test_partly_frozen_modules_update_in_backward(ranks: Any) -> None:
    ours, _ = ranks(2).run(in_backward, "frozen_lora", "fsdp_custom:optimizer_in_backward=true", 2)[0]
    assert difference(ours, in_backward("frozen_lora", "auto", 1)[0]) < TOLERANCE

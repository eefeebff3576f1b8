"""Steps under manual optimization that end in a forward without backward leave shards behind."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch

from lightning_parallel import full_state_dict
from tests.data import batches
from tests.models.cases import ByteGPT
from tests.parity import TOLERANCE, difference, once, trainer_for


class WithoutBackward(ByteGPT):
    """Every second step has no backward, and a hook shrinks weights after each."""

    def __init__(self) -> None:
        super().__init__("sgd")
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if batch_idx % 2:
            self.manual_backward(loss)
            optimizer = self.optimizers()
            assert not isinstance(optimizer, list)
            optimizer.step()
            optimizer.zero_grad()
        return loss

    @torch.no_grad()
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for parameter in self.parameters():
            assert parameter.dtype == torch.float32, "rounded, as the step computes with it"
            parameter.mul_(0.9)


def weights_without_backward(strategy: str, size: int, precision: str) -> Any:
    L.seed_everything(3, verbose=False)
    trainer = trainer_for(strategy, size, precision=precision)
    trainer.fit(WithoutBackward(), batches("byte_gpt", size))
    return full_state_dict(trainer)


@pytest.mark.parametrize("strategy", ["fsdp_custom", "zero2_custom"])
def test_a_hook_writes_after_a_step_without_backward(ranks: Any, strategy: str) -> None:
    found = ranks(2).run(weights_without_backward, strategy, 2, "32-true")
    assert difference(found[0], once(weights_without_backward, "auto", 1, "32-true")) <= TOLERANCE


def test_a_hook_reads_what_no_step_has_rounded(ranks: Any) -> None:
    ranks(2).run(weights_without_backward, "fsdp_custom", 2, "bf16-mixed")

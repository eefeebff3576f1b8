"""Modules that are built in Lightning's `setup` hook: planned, and refused, once they are there."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
from torch import Tensor

from lightning_parallel import ConfigurationError, build_strategy, full_state_dict
from tests.data import loader_of
from tests.models.cases import GPT, next_token_loss, optimizer_of
from tests.names import num_readers
from tests.parity import TOLERANCE, difference, make_trainer


class BuiltInSetup(L.LightningModule):
    """As many people write it: the size of the model depends on the data, which is there only now."""

    def setup(self, stage: str) -> None:
        if not hasattr(self, "model"):
            self.model = GPT()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return next_token_loss(self.model(batch[0]), batch[0])

    def configure_optimizers(self) -> Any:
        return optimizer_of("adamw", self.parameters())


def train(strategy: str, num_ranks: int) -> dict[str, Tensor]:
    L.seed_everything(5, verbose=False)
    built = strategy if strategy == "auto" else build_strategy(strategy)
    trainer = make_trainer(built, num_ranks)
    readers = num_readers(strategy, num_ranks)
    trainer.fit(BuiltInSetup(), loader_of("byte_gpt", steps=3, global_batch=8, num_ranks=readers))
    return full_state_dict(trainer)


@pytest.mark.parametrize("strategy", ["ddp_custom", "fsdp_custom", "tp_custom", "cp_custom", "pp_custom"])
def test_it_trains_as_in_one_process(ranks: Any, strategy: str) -> None:
    assert difference(ranks(2).run(train, strategy, 2)[0], train("auto", 1)) < TOLERANCE


def refusal(strategy: str) -> str:
    try:
        train(strategy, 2)
    except ConfigurationError as error:
        return str(error)
    return ""


def test_it_is_refused_once_it_is_built(ranks: Any) -> None:
    first, second = ranks(2).run(refusal, "fsdp_custom:layers=model.nowhere")
    assert "layers='model.nowhere' does not exist in BuiltInSetup" in first
    assert second == "refused; rank 0 says why"

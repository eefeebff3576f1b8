"""Parameters that hooks add when the module is parallel already are refused."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn

from lightning_parallel import ConfigurationError, build_strategy
from tests.data import batches
from tests.models.cases import VOCABULARY, ByteGPT, next_token_loss
from tests.names import num_ranks, num_readers
from tests.parity import make_trainer


class AddsHead(ByteGPT):
    """Gets a further map at the start of training, and gives it to the optimizer."""

    extra: nn.Module = nn.Identity()
    at_epoch = 0

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == self.at_epoch:
            self.extra = nn.Linear(VOCABULARY, VOCABULARY)
            self.trainer.optimizers[0].add_param_group({"params": list(self.extra.parameters())})

    def loss(self, tokens: Tensor) -> Tensor:
        return next_token_loss(self.extra(self.model(tokens)), tokens)


class AddsHeadLater(AddsHead):
    at_epoch = 1


def error_of(make: Any, strategy: str) -> str:
    name = strategy.partition(":")[0]
    size = num_ranks(name)
    trainer = make_trainer(build_strategy(strategy), size, max_epochs=2)
    with pytest.raises(ConfigurationError) as caught:
        trainer.fit(make(), batches("byte_gpt", num_readers(name, size), 2))
    return str(caught.value)


@pytest.mark.parametrize("make", [AddsHead, AddsHeadLater])
@pytest.mark.parametrize("name", ["zero2_custom", "fsdp_custom", "hsdp_custom", "fsdp_tp_custom", "pp_custom"])
def test_added_parameters_are_refused(ranks: Any, make: Any, name: str) -> None:
    first, *others = ranks(num_ranks(name)).run(error_of, make, f"{name}:check=off")
    assert "2 trainable parameters were added when the module was parallel already" in first
    assert "extra.weight, extra.bias" in first
    assert all("rank 0 says why" in other for other in others)

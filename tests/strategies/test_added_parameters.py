"""Parameters that hooks add when the module is parallel already are refused; copies of parameters may be kept."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

from lightning_parallel import ConfigurationError, build_strategy
from tests.data import batches
from tests.models.cases import VOCABULARY, ByteGPT, next_token_loss
from tests.names import num_ranks, num_readers
from tests.parity import TOLERANCE, Outcome, checked, make_trainer, once, train_module, worst


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


class Prunes(ByteGPT):
    """Gives parameters other names, and computes those of the layers from them."""

    def on_train_epoch_start(self) -> None:
        for block in self.model.blocks:
            if not prune.is_pruned(block):
                prune.random_unstructured(block.mlp[0], "weight", amount=0.3)


class Parametrizes(ByteGPT):
    def on_fit_start(self) -> None:
        parametrize.register_parametrization(self.model.blocks[0].mlp[0], "weight", nn.Identity())


@pytest.mark.parametrize(
    ("make", "name"), [(Prunes, "weight_orig"), (Parametrizes, "parametrizations.weight.original")]
)
@pytest.mark.parametrize("strategy", ["fsdp_custom", "zero2_custom", "tp_custom", "fsdp_tp_custom"])
def test_parameters_that_are_made_of_others_are_refused(ranks: Any, make: Any, name: str, strategy: str) -> None:
    first, *others = ranks(num_ranks(strategy)).run(error_of, make, strategy)
    assert "trainable parameters were made of others when these were sharded or split over ranks already" in first
    assert f"model.blocks.0.mlp.0.{name}" in first
    assert all("rank 0 says why" in other for other in others)


class StartsFrom(ByteGPT):
    """Keeps the weights with which training starts, as buffers and as frozen parameters, and is drawn to them."""

    def on_train_start(self) -> None:
        for name, parameter in [*self.named_parameters()]:
            self.register_buffer("start_" + name.replace(".", "_"), parameter.detach().clone())
        self.start = nn.ParameterList([nn.Parameter(p.detach().clone(), False) for p in self.model.parameters()])

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for start, (name, parameter) in zip(self.start, self.model.named_parameters(prefix="model"), strict=True):
            assert parameter.grad is not None
            buffer = getattr(self, "start_" + name.replace(".", "_"))
            parameter.grad.add_(2 * parameter.detach() - start.detach() - buffer, alpha=0.1)


def kept_weights(strategy: str, num_ranks: int) -> Outcome:
    loader = batches("byte_gpt", num_readers(strategy.partition(":")[0], num_ranks))
    return train_module(StartsFrom, loader, strategy, num_ranks)


@pytest.mark.parametrize(
    "name", ["ddp_custom", "zero1_custom", "fsdp_custom", "tp_custom", "cp_custom", "fsdp_tp_custom"]
)
def test_copies_of_weights_may_be_buffers(ranks: Any, name: str) -> None:
    size = num_ranks(name)
    found = ranks(size).run(kept_weights, checked(name), size)[0]
    assert worst(found, once(kept_weights, "auto", 1)) < TOLERANCE


class KnowsByOtherNames(ByteGPT):
    """Refers to its parts by further attributes."""

    def on_train_epoch_start(self) -> None:
        self.current = self.model.head
        self.last = self.model.blocks[-1]


@pytest.mark.parametrize("name", ["fsdp_custom", "tp_custom", "pp_custom"])
def test_further_names_of_parameters_are_no_others(ranks: Any, name: str) -> None:
    assert worst(ranks(2).run(further_names, name, 2)[0], once(further_names, "auto", 1)) < TOLERANCE


def further_names(strategy: str, num_ranks: int) -> Outcome:
    loader = batches("byte_gpt", num_readers(strategy, num_ranks))
    outcome = train_module(KnowsByOtherNames, loader, strategy, num_ranks)
    outcome.final = {name: value for name, value in outcome.final.items() if name.startswith("model.")}
    return outcome

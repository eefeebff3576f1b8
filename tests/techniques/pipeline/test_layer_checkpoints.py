"""Modules that checkpoint activations by themselves, around the layers that a pipeline cuts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

from tests.data import batches
from tests.models.checkpointed import AroundAll, EachLayer, Sequentially
from tests.parity import TOLERANCE, Outcome, once, train_module, worst

MODULES: dict[str, Callable[..., Any]] = {
    "each layer": EachLayer,
    "each layer, reentrant": functools.partial(EachLayer, use_reentrant=True),
    "around all": AroundAll,
    "sequentially": Sequentially,
    "dropout": functools.partial(EachLayer, dropout=0.3),
    "dropout without": functools.partial(EachLayer, dropout=0.3, is_on=False),
}


def fit(kind: str, strategy: str, num_ranks: int) -> Outcome:
    return train_module(MODULES[kind], batches("byte_gpt", 1), strategy, num_ranks)


@pytest.mark.parametrize("strategy", ["pp_custom", "pp_custom:schedule=gpipe,loss=batch", "fsdp_custom:pipeline=2"])
@pytest.mark.parametrize("kind", ["each layer", "each layer, reentrant", "around all", "sequentially"])
def test_gradients_are_those_of_one_process(ranks: Any, kind: str, strategy: str) -> None:
    assert worst(ranks(2).run(fit, kind, strategy, 2)[0], once(fit, kind, "auto", 1)) < TOLERANCE


def test_layers_draw_the_same_masks_again(ranks: Any) -> None:
    found, expected = (ranks(2).run(fit, kind, "pp_custom", 2)[0] for kind in ("dropout", "dropout without"))
    assert worst(found, expected) < TOLERANCE


def calls_of_a_layer(strategy: str, num_ranks: int) -> int:
    """How often a layer's own forward runs in one step, on this rank: twice for each microbatch with a checkpoint."""
    counted: list[object] = []
    make = MODULES["each layer"]
    cls = type(make().model.blocks[0])
    forward = cls.forward

    def counting(self: Any, *args: Any) -> Any:
        counted.append(self)
        return forward(self, *args)

    with mock.patch.object(cls, "forward", counting):
        train_module(make, batches("byte_gpt", 1, 1), strategy, num_ranks)
        with_first = len(counted)
        counted.clear()
        train_module(make, batches("byte_gpt", 1, 3), strategy, num_ranks)
    return (len(counted) - with_first) // 2


def test_activations_are_computed_again(ranks: Any) -> None:
    strategy = "pp_custom:stages=[1,2],microbatches=4,loss=microbatch"
    assert ranks(2).run(calls_of_a_layer, strategy, 2) == [2 * 4 * 1, 2 * 4 * 2]

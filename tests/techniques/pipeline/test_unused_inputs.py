"""Layers behind which the graph is cut get no gradient on any stage: weight decay leaves them alone."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from lightning_parallel import ConfigurationError
from tests.data import batches
from tests.models.cases import GPT, Block, ByteGPT
from tests.models.pipelined import OfCutGraph
from tests.parity import TOLERANCE, largest, once, train_module, worst
from tests.rank_pool import RankError


class Deciding(Block):
    """Decides by its input whether the graph is cut, and so for each microbatch."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.detach() if float(x.detach()[0].sum()) > 0 else x)


class OfDeciding(ByteGPT):
    def __init__(self) -> None:
        super().__init__("adamw")
        self.model = GPT(depth=4)
        self.model.blocks[3] = Deciding(16)


def fitted(
    make: Any, args: tuple[Any, ...], strategy: str, num_ranks: int, readers: int = 1, steps: int = 4, **kwargs: Any
) -> Any:
    try:
        return train_module(lambda: make(*args), batches("byte_gpt", readers, steps), strategy, num_ranks, **kwargs)
    except ConfigurationError as error:
        return str(error)


@pytest.mark.parametrize("places", [(3,), (2,), (1,), (1, 3)], ids=str)
def test_equal_to_one_process(ranks: Any, places: tuple[int, ...]) -> None:
    expected = once(fitted, OfCutGraph, places, "auto", 1)
    strategies = ("", ":loss=microbatch", ":schedule=interleaved,virtual_stages=2", ":schedule=zbv", ":schedule=turns")
    found = {}
    for options in strategies:
        ours = ranks(2).run(fitted, OfCutGraph, places, f"pp_custom{options}", 2)[0]
        assert not isinstance(ours, str), (options, ours)
        found[options] = worst(ours, expected)
    assert largest(found.values()) <= TOLERANCE, found


@pytest.mark.parametrize(("strategy", "readers"), [("pp_custom:pipeline=4", 1), ("pp_custom:pipeline=2,shard=2", 2)])
def test_equal_to_one_process_on_four_ranks(ranks: Any, strategy: str, readers: int) -> None:
    expected = once(fitted, OfCutGraph, (3,), "auto", 1)
    ours = ranks(4).run(fitted, OfCutGraph, (3,), strategy, 4, readers)[0]
    assert not isinstance(ours, str), ours
    assert worst(ours, expected) <= TOLERANCE


def test_equal_in_windows(ranks: Any) -> None:
    options: dict[str, Any] = {"accumulate_grad_batches": 2}
    expected = once(fitted, OfCutGraph, (3,), "auto", 1, **options)
    assert worst(ranks(2).run(fitted, OfCutGraph, (3,), "pp_custom", 2, **options)[0], expected) <= TOLERANCE


def test_microbatches_that_decide_otherwise_are_refused(ranks: Any) -> None:
    with pytest.raises(RankError, match="stage 1 receives gets no gradient in a step's first microbatch"):
        ranks(2).run(fitted, OfDeciding, (), "pp_custom:check=off", 2, 1, 8)

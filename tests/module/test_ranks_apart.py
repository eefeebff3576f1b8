"""Layers that raise, or do something else, on one rank's part only: all ranks are told, and none waits for ever."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data import DataLoader

from lightning_parallel import ConfigurationError, build_strategy
from tests.data import batches
from tests.models.apart import Apart, GraphNet, graphs
from tests.parity import make_trainer

DEADLINE = 60.0
"""Seconds. Where ranks wait for each other, it passes."""

KINDS = {
    "Raises": {"fails", "elsewhere"},
    "RaisesItsOwn": {"fails", "elsewhere"},
    "RaisesBehindAttention": {"fails", "elsewhere"},
    "RaisesInBackward": {"fails", "elsewhere"},
    "Catches": {"apart"},
    "Skips": {"apart"},
    "Differs": {"differs"},
}
WORDS = {
    "fails": "fails on a part of the sequence: an edge leads to node 15 of 8",
    "elsewhere": "the check of context parallel failed on another rank; see its message, or give context=1",
    "apart": "ranks do not do the same on their parts of the sequence: this one has come to ",
    "differs": "context parallel changes what layers.0 (Differs) computes",
}


def refusals(layers: list[str], strategy: str) -> dict[str, str]:
    return {layer: refusal(layer, strategy) for layer in layers}


def refusal(layer: str, strategy: str) -> str:
    try:
        make_trainer(build_strategy(strategy), 2).fit(Apart(layer), batches("byte_gpt", 1))
    except ConfigurationError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("attention", ["ulysses", "ring"])
def test_what_one_rank_does_by_itself_is_refused_on_all(ranks: Any, attention: str) -> None:
    found = ranks(2).run(refusals, [*KINDS], f"cp_custom:context_attention={attention}", deadline=DEADLINE)
    for layer, kinds in KINDS.items():
        messages = [of_rank[layer] for of_rank in found]
        kinds_found = {kind for message in messages for kind, words in WORDS.items() if words in message}
        assert kinds_found == kinds, messages
        assert all(f"layers.0 ({layer})" in message for message in messages)


def test_parts_of_different_lengths_are_refused_on_all(ranks: Any) -> None:
    for message in ranks(2).run(refusal, "Drops", "cp_custom", deadline=DEADLINE):
        assert WORDS["apart"] in message, message


@pytest.mark.parametrize("strategy", ["tp_custom", "tp_custom:sequence=true"])
def test_features_that_fail_on_one_rank_are_refused_on_all(ranks: Any, strategy: str) -> None:
    found = ranks(2).run(refusal, "MarkedFeature", strategy, deadline=DEADLINE)
    assert ["feature 63 of 32" in message for message in found] == [False, True], found
    assert all("layers.0 (MarkedFeature)" in message for message in found)


def refusals_of_graphs(strategy: str) -> list[str]:
    """Of graphs of which one rank has more than the other, and larger ones."""
    found = []
    for sizes in ([3, 7, 5, 9], [2, 2, 17], [20, 1]):
        try:
            loader = DataLoader(graphs(sizes), batch_size=None)  # type: ignore[arg-type]
            make_trainer(build_strategy(strategy), 2).fit(GraphNet(), loader)
            found.append("")
        except ConfigurationError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("attention", ["ulysses", "ring"])
def test_messages_along_edges_are_refused_on_all(ranks: Any, attention: str) -> None:
    found = ranks(2).run(refusals_of_graphs, f"cp_custom:context_attention={attention}", deadline=DEADLINE)
    assert all("layers.0 (GraphLayer)" in message for messages in found for message in messages), found

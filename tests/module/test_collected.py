"""What hooks collect inside of layers, in lists that context variables hold: it is that of whole layers, once."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import pytest
import torch
from torch import nn

from lightning_parallel.module.collected import collected_from_now, collecting_containers, replace_collected
from lightning_parallel.module.dry_run import side_effects_undone
from tests.data import batches
from tests.jobs.fits import messages
from tests.models import collecting
from tests.parity import TOLERANCE, once, train_module, worst

_seen: ContextVar[dict[str, list[Any]] | None] = ContextVar("seen", default=None)

RUNS = [
    ("RouterLoss", "cp_custom", 2, 1),
    ("RouterLoss", "tp_custom", 2, 1),
    ("RouterLossWithMask", "cp_custom", 2, 1),
    ("RouterLoss", "cp_custom:recompute=full", 2, 1),
    ("MiddleStates", "cp_custom", 2, 1),
    ("MiddleStates", "tp_custom", 2, 1),
    ("Attentions", "tp_custom", 2, 1),
    ("RouterLoss", "fsdp_custom:context=2,tensor=2", 4, 1),
    ("RouterLoss", "pp_custom", 2, 1),
    ("RouterLoss", "pp_custom:schedule=turns", 2, 1),
    ("FreshRouters", "pp_custom", 2, 1),
    ("RouterLossWithMask", "pp_custom", 2, 1),
    ("RouterLossWithMask", "pp_custom:schedule=turns", 2, 1),
    ("MiddleStates", "pp_custom", 2, 1),
    ("MiddleStates", "pp_custom:schedule=turns", 2, 1),
    ("Attentions", "pp_custom", 2, 1),
    ("Attentions", "pp_custom:schedule=turns", 2, 1),
]
"""A module, a name with options, the number of ranks, and how many of them read different samples."""


def trained(kind: str, strategy: str, num_ranks: int, num_readers: int) -> Any:
    """Five steps; and how many logits of routers each step has."""
    modules: list[Any] = []

    def make() -> Any:
        modules.append(getattr(collecting, kind)())
        return modules[0]

    outcome = train_module(make, batches("byte_gpt", num_readers), strategy, num_ranks)
    return outcome, getattr(modules[0], "counts", [])


@pytest.mark.parametrize(("kind", "name", "size", "readers"), RUNS, ids=str)
def test_losses_on_what_hooks_collect(kind: str, name: str, size: int, readers: int, ranks: Any) -> None:
    expected, counts = once(trained, kind, "auto", 1, 1)
    (ours, found), *_ = ranks(size).run(trained, kind, name, size, readers)
    assert found == counts
    assert worst(ours, expected) < TOLERANCE


@pytest.mark.parametrize(
    ("kind", "name", "words"),
    [
        ("RouterLoss", "tp_custom:sequence=true", "(64, 4) in place of (128, 4)"),
        ("Attentions", "cp_custom", "attn_implementation='sdpa'"),
    ],
)
def test_what_no_rank_has_whole_is_refused(kind: str, name: str, words: str, ranks: Any) -> None:
    for found in ranks(2).run(messages, trained, kind, name, 2, 1):
        assert words in " ".join(found)


class Collecting(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for entries in (_seen.get() or {}).values():
            entries.append(x)
        return x * 2


def test_a_trial_run_leaves_nothing_in_context_variables() -> None:
    layer, first, x = Collecting(), torch.zeros(1), torch.ones(2)
    held = {"states": [first]}
    token = _seen.set(held)
    try:
        entries = held["states"]
        assert any(each is entries for each in collecting_containers())
        with side_effects_undone(layer):
            layer(x)
            held["others"] = [x]
            assert len(entries) == 2
        assert held == {"states": [first]}
        assert held["states"] is entries
        collected = collected_from_now()
        layer(x)
        assert collected is not None
        assert collected.tensors == [x]
        collected.replace(torch.neg)
        assert entries[1].tolist() == [-1, -1]
        replace_collected(entries[1], torch.neg)
        replace_collected(first, torch.neg)  # no longer the last
        assert [each.tolist() for each in entries] == [[0], [1, 1]]
    finally:
        _seen.reset(token)

"""Training of networks whose layers take more than hidden states."""

from __future__ import annotations

from tests.data import batches
from tests.models.argument_nets import FURTHER_NETS, NETS
from tests.parity import Outcome, once, train_module


def trained(name: str, strategy: str, num_ranks: int) -> Outcome:
    return train_module({**NETS, **FURTHER_NETS}[name], batches("byte_gpt", 1), strategy, num_ranks)


def expected(name: str) -> Outcome:
    """One process's numbers."""
    return once(trained, name, "auto", 1)

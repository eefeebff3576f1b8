"""What a checkpoint copies to host memory, on which ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from lightning_parallel import full_state_dict
from tests import parity
from tests.data import batches
from tests.models.cases import ByteGPT

_LARGE = 256
"""Elements from which on a tensor is a weight or its state, and no counter."""


class Saves(ByteGPT):
    """Saves after a step, and counts the copies to the host that this takes, and those of all weights."""

    def __init__(self, path: str) -> None:
        super().__init__("adamw")
        self.path = path
        self.copies: list[int] = []
        self.weights: dict[str, Tensor] = {}

    def on_train_batch_end(self, *args: Any) -> None:
        for save in (lambda: self.trainer.save_checkpoint(self.path), self.take):
            sizes: list[int] = []
            plain = Tensor.cpu

            def copy(tensor: Tensor, sizes: list[int] = sizes, plain: Any = plain) -> Tensor:
                sizes.append(tensor.numel())
                return plain(tensor)  # type: ignore[no-any-return]

            with mock.patch.object(Tensor, "cpu", copy):
                save()
            self.copies.append(sum(size >= _LARGE for size in sizes))

    def take(self) -> None:
        self.weights = full_state_dict(self.trainer)


def saved(strategy: str, num_ranks: int, readers: int, path: str) -> tuple[list[int], dict[str, Tensor]]:
    """The copies of this rank, and what `full_state_dict` gave it."""
    module = Saves(path)
    parity.trainer_for(strategy, num_ranks, max_steps=1).fit(module, batches("byte_gpt", readers))
    return module.copies, module.weights


@pytest.mark.parametrize(
    ("strategy", "num_ranks", "readers", "copying"),
    [
        ("fsdp_custom", 2, 2, [True, False]),
        ("hsdp_custom", 4, 4, [True, False, False, False]),
        # Those of the pipeline of rank 0, which get what its stages hold; the other pipeline has the same values.
        ("fsdp_custom:pipeline=2", 4, 2, [True, False, True, False]),
    ],
)
def test_ranks_that_keep_nothing_copy_nothing(
    ranks: Any, tmp_path: Path, strategy: str, num_ranks: int, readers: int, copying: list[bool]
) -> None:
    path = str(tmp_path / "saved.ckpt")
    found = ranks(num_ranks).run(saved, strategy, num_ranks, readers, path)
    for (copies, weights), copies_any in zip(found, copying, strict=True):
        assert [number > 0 for number in copies] == [copies_any, copies_any]
        assert bool(weights) == (weights is found[0][1])
    checkpoint = torch.load(path, weights_only=False)
    assert parity.difference(checkpoint["state_dict"], found[0][1]) == 0
    states = checkpoint["optimizer_states"][0]["state"]
    assert len(states) == len(list(ByteGPT().parameters()))
    assert all(set(entries) == {"step", "exp_avg", "exp_avg_sq"} for entries in states.values())

"""A checkpoint of another model ends a resume on all ranks alike, in either form, and names what does not fit."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_parallel import build_strategy
from tests.data import batches
from tests.models.cases import ByteGPT
from tests.parity import make_trainer


class Extra(ByteGPT):
    """With a layer that the checkpoint does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(3, 3)


class Wider(ByteGPT):
    """With a weight of another size."""

    def __init__(self) -> None:
        super().__init__()
        self.model.blocks[0].norm1.weight = nn.Parameter(torch.ones(32))


class Deeper(ByteGPT):
    """With one more layer."""

    def __init__(self) -> None:
        super().__init__()
        self.model.blocks.append(copy.deepcopy(self.model.blocks[0]))


class Shallower(ByteGPT):
    """With one layer less."""

    def __init__(self) -> None:
        super().__init__()
        del self.model.blocks[-1]


WORDS = {
    Extra: 'Missing key(s) in state_dict: "extra.weight", "extra.bias"',
    Wider: "size mismatch for model.blocks.0.norm1.weight: copying a param with shape torch.Size([16]) from checkpoint",
    Deeper: 'Missing key(s) in state_dict: "model.blocks.3.norm1.weight"',
    Shallower: 'Unexpected key(s) in state_dict: "model.blocks.2.norm1.weight"',
}


def save(path: str, form: str) -> None:
    trainer = make_trainer(build_strategy(f"fsdp_custom:checkpoint={form}"), 2, max_steps=1)
    trainer.fit(ByteGPT(), batches("byte_gpt", 2, 1))
    trainer.save_checkpoint(path)


def ending(path: str, name: str, make: Any) -> str:
    """The words with which this rank's resume ends."""
    trainer = make_trainer(build_strategy(name), 2, max_steps=2)
    try:
        trainer.fit(make(), batches("byte_gpt", 1, 2), ckpt_path=path)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("form", ["whole", "sharded"])
def test_what_does_not_fit_is_named_on_all_ranks(ranks: Any, tmp_path: Path, form: str) -> None:
    path = str(tmp_path / "a.ckpt")
    ranks(2).run(save, path, form)
    for name in ("ddp_custom", "fsdp_custom", "pp_custom", "tp_custom"):
        for make, words in WORDS.items():
            found = ranks(2).run(ending, path, name, make)
            assert all(words in each for each in found), (name, make, found)

"""Sharded units have the class names that their author gave them, and may be of any class."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Generic, TypeVar

import lightning as L
import pytest
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_parallel import full_state_dict
from tests.data import loader
from tests.models.cases import Block, ByteGPT
from tests.parity import TOLERANCE, difference, trainer_for

T = TypeVar("T")


class WithSlots:
    __slots__ = ()


class OddBlock(WithSlots, Generic[T], Block):
    """Its first bases have no attributes."""


class Reading(ABC):
    @abstractmethod
    def read(self) -> str: ...


class GenericFirst(Generic[T], Reading, ByteGPT):
    """Generic, abstract, and of layers that are."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.model.blocks = nn.ModuleList([OddBlock[int](), OddBlock(), OddBlock[int]()])

    def read(self) -> str:
        return type(self).__name__


def names_in_fit(strategy: str, num_ranks: int) -> tuple[list[str], dict[str, Tensor]]:
    found: list[str] = []

    class Look(Callback):
        def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
            blocks = pl_module.model.blocks
            assert num_ranks == 1 or all(isinstance(unit, FSDPModule) for unit in (pl_module, *blocks))
            found.extend([pl_module.read(), type(pl_module).__module__, repr(pl_module), type(blocks[0]).__qualname__])

    L.seed_everything(3, verbose=False)
    trainer = trainer_for(strategy, num_ranks, callbacks=[Look()])
    trainer.fit(module := GenericFirst(), loader(num_ranks, 2))
    assert type(module) is GenericFirst
    assert type(module.model.blocks[1]) is OddBlock
    return found, full_state_dict(trainer)


@pytest.mark.parametrize("name", ["fsdp_custom", "zero2_custom"])
def test_units_keep_their_names(ranks: Any, name: str) -> None:
    names, weights = ranks(2).run(names_in_fit, name, 2)[0]
    expected_names, expected = names_in_fit("auto", 1)
    assert names == expected_names
    assert difference(weights, expected) <= TOLERANCE

"""Lightning moves batches to the device, and nobody moves them again: users leave some tensors on the host."""

from __future__ import annotations

from collections import defaultdict
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.utils import _to_kwargs
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from tests.data import loader
from tests.models.cases import ByteGPT
from tests.parity import TOLERANCE, once, trainer_for


class OfDictionaries(ByteGPT):
    """Takes its batch as a `defaultdict`."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert type(batch) is defaultdict
        return super().training_step(batch["tokens"], batch_idx)

    def norm(self) -> Any:
        """Of a parameter, by a method that is given nothing."""
        return self.model.tokens.weight.norm()

    def on_train_start(self) -> None:
        self.norm()

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        moved = super().transfer_batch_to_device(batch, device, dataloader_idx)
        return defaultdict(list, {"tokens": moved})


class Wrapped(Callback):
    """Whether DDP has a device to which it would move batches."""

    def __init__(self) -> None:
        self.moves: Any = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        model = trainer.strategy.model
        self.moves = bool(model.device_ids) if isinstance(model, DistributedDataParallel) else False


def trained(strategy: str, num_ranks: int) -> tuple[bool, list[int], float]:
    """Whether DDP moves batches, how many tensors torch's sharding is shown at its root, and the last loss."""
    L.seed_everything(1, verbose=False)
    shown: list[int] = []
    own = FSDPState._root_pre_forward

    def root(self: FSDPState, module: Any, args: Any, kwargs: Any) -> Any:
        if isinstance(module, L.LightningModule):
            shown.append(sum(isinstance(leaf, torch.Tensor) for leaf in tree_leaves((args, kwargs))))
        assert _to_kwargs(args, kwargs, torch.device("cpu"), False)[0]  # on GPUs, 2.11 asks for the first of these
        return own(self, module, args, kwargs)

    wrapped = Wrapped()
    with mock.patch.object(FSDPState, "_root_pre_forward", root):
        trainer = trainer_for(strategy, num_ranks, callbacks=[wrapped], max_steps=2)
        trainer.fit(OfDictionaries("sgd"), loader(num_ranks))
    return wrapped.moves, shown, float(trainer.callback_metrics["train_loss"])


@pytest.mark.parametrize("name", ["ddp_custom", "zero1_custom", "fsdp_custom", "fsdp_custom:forward_methods=norm"])
def test_no_batch_is_moved_again(ranks: Any, name: str) -> None:
    *_, expected = once(trained, "auto", 1)
    found = ranks(2).run(trained, name, 2)
    for moves, shown, _ in found:
        assert not moves
        assert not any(shown)
        assert bool(shown) == name.startswith("fsdp_custom")
    assert sum(loss for *_, loss in found) / 2 == pytest.approx(expected, abs=TOLERANCE)

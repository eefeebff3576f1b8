"""A fit whose hooks note what they find in the place of two parameters and of a gradient."""

from __future__ import annotations

from typing import Any, ClassVar

import lightning as L
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_parallel.module.placeholders import is_placeholder
from tests.data import GLOBAL_BATCH, loader_of
from tests.models.cases import ByteGPT
from tests.names import num_readers
from tests.parity import trainer_for

LAYER, ROOT = "model.blocks.0.mlp.0.weight", "model.head.weight"
HOOKS = (
    "setup", "on_fit_start", "on_train_start", "on_train_batch_start", "on_before_backward",
    "on_after_backward", "on_before_optimizer_step", "on_train_end", "on_fit_end", "teardown",
)  # fmt: skip
Found = dict[str, tuple[str, ...]]
"""Hook -> what the two parameters are there, and the gradient of the first."""


def kind(value: Tensor | None) -> str:
    """What is in the place of a tensor."""
    if value is None:
        return "none"
    if is_placeholder(value):
        return "placeholder"
    return "part" if isinstance(value, DTensor) else "whole"


class Noting(ByteGPT):
    """Notes them in each of its hooks.

    Not on itself: under a pipeline, what a step keeps on the module is that of the last stage, on all ranks.
    """

    found: ClassVar[Found] = {}

    def note(self, hook: str) -> None:
        layer, root = self.get_parameter(LAYER), self.get_parameter(ROOT)
        Noting.found[hook] = kind(layer), kind(root), kind(layer.grad)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.note("training_step")
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *args: Any) -> None:
        self.note("on_train_batch_end")
        with torch.no_grad():  # as the page says that one may
            for parameter in self.parameters():
                parameter.mul_(0.999)

    def configure_optimizers(self) -> Any:
        self.note("configure_optimizers")
        return super().configure_optimizers()


def _noting(hook: str) -> Any:
    return lambda self, *args, **kwargs: self.note(hook)


for _hook in HOOKS:
    setattr(Noting, _hook, _noting(_hook))


def found_in_hooks(strategy: str, num_ranks: int) -> Found:
    """What the hooks of one step find on this rank."""
    L.seed_everything(3, verbose=False)
    Noting.found.clear()
    readers = num_readers(strategy.partition(":")[0], num_ranks)
    trainer = trainer_for(strategy, num_ranks)
    trainer.fit(Noting(), loader_of("byte_gpt", steps=1, global_batch=GLOBAL_BATCH, num_ranks=readers))
    return dict(Noting.found)

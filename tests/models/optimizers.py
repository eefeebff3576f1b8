"""Optimizers that people write, and callbacks of Lightning's that look into one, on one device."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.callbacks import BaseFinetuning

from tests.models.cases import ByteGPT


class OneSided(torch.optim.Optimizer):
    """A preconditioner of rows (Gupta et al. 2018), which takes whole matrices."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None:
                    continue
                if gradient.ndim == 2:
                    state = self.state[parameter]
                    sums = state.get("sums", torch.eye(len(gradient)))
                    state["sums"] = sums + gradient @ gradient.T
                    gradient = torch.linalg.solve(state["sums"], gradient)
                parameter.add_(gradient, alpha=-group["lr"])
        return loss


class Preconditioned(ByteGPT):
    def configure_optimizers(self) -> Any:
        return OneSided(self.parameters(), lr=0.1)


class Thaw(BaseFinetuning):
    """Trains the layers from the second epoch on: each of their parameters is looked for in the optimizer."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.model.blocks)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.model.blocks, optimizer, lr=5e-3)

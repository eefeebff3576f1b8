"""Optimizers that people write, and callbacks of Lightning's that look into one, on one device."""

from __future__ import annotations

from collections import OrderedDict
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


class ByNorms(torch.optim.Optimizer):
    """Lists of tensors, means of rows, and sums in plain tensors: what torch refuses of parts of parameters."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    def _state_of(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        state = self.state[parameter]
        if not state:
            state["average"], state["most"], state["before"] = (torch.zeros_like(parameter) for _ in range(3))
            state["rows"] = torch.zeros(parameter.shape[:-1])
            state["total"] = torch.zeros(())
        return state  # type: ignore[no-any-return]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            states = [self._state_of(p) for p in parameters]
            gradients = [p.grad for p in parameters]
            norms = torch._foreach_norm(gradients)
            torch._foreach_div_(norms, [p.numel() ** 0.5 for p in parameters])
            scaled = torch._foreach_div(gradients, [norm.clamp_min(1e-3) for norm in norms])
            averages = [state["average"] for state in states]
            torch._foreach_lerp_(averages, scaled, 0.5)
            torch._foreach_maximum_([state["most"] for state in states], torch._foreach_abs(averages))
            torch._foreach_maximum_([state["most"] for state in states], 1e-4)
            torch._foreach_addcmul_([state["most"] for state in states], scaled, scaled, 1e-2)
            larger = torch._foreach_add([state["most"] for state in states], 1.0)
            torch._foreach_copy_(averages, torch._foreach_addcdiv(averages, scaled, larger, 1e-2))
            torch._foreach_copy_([state["before"] for state in states], scaled)
            for parameter, state in zip(parameters, states, strict=True):
                squares = state["before"].square().mean(-1)
                state["rows"].lerp_(squares.sqrt_(), 0.5)
                state["total"].add_(squares.sum())
                step = state["average"] / (state["most"] + state["rows"].unsqueeze(-1).add(0.5) + state["total"])
                parameter.add_(step, alpha=-group["lr"])
        return loss


class Normed(ByteGPT):
    def configure_optimizers(self) -> Any:
        return ByNorms(self.parameters(), lr=1e-2)


class Draws(torch.optim.SGD):
    """Begins with a drawn velocity, as Gravity does (Bahrami and Zadeh 2021), and adds drawn noise."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["velocity"] = torch.empty_like(parameter).normal_(std=0.1)
                state["velocity"].mul_(0.9).add_(parameter.grad).add_(torch.randn_like(parameter), alpha=1e-2)
                parameter.add_(state["velocity"], alpha=-group["lr"])
        return loss


class Noisy(ByteGPT):
    def configure_optimizers(self) -> Any:
        return Draws(self.parameters(), lr=1e-2)


class NoisyAndDropped(Noisy):
    """Ranks that read different samples drop different ones, and draw alike for the update."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return torch.nn.functional.dropout(super().training_step(batch, batch_idx).expand(100), 0.1).mean()


class Lookahead(torch.optim.Optimizer):
    """Wraps another one, and is none itself (Zhang et al. 2019)."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups, self.defaults = optimizer.param_groups, optimizer.defaults
        self.state = optimizer.state
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


class Wrapped(ByteGPT):
    def configure_optimizers(self) -> Any:
        return Lookahead(torch.optim.SGD(self.parameters(), lr=1e-2))

"""Keep optimizer state, or all state, in host memory.

Source: Rajbhandari et al. 2021, "ZeRO-Infinity"; `torch.distributed.fsdp.CPUOffloadPolicy`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.optim import Optimizer

from lightning_parallel.module.optimizer_hooks import register_update_hooks

OFFLOADS = ("none", "optimizer", "all")


def offload_violations(offload: str) -> list[str]:
    """Reasons why `offload` is not a choice; empty if it is."""
    return [] if offload in OFFLOADS else [f"offload={offload!r} is unknown; possible: {', '.join(OFFLOADS)}"]


def replicated_offload_violations(offload: str) -> list[str]:
    """Reasons why `offload` cannot be used where every rank computes with its own whole copy; empty if it can."""
    if offload != "all":
        return offload_violations(offload)
    return [
        "offload='all' brings parameters to the device layer by layer, which needs sharding; use fsdp_offload_custom "
        "(or fsdp_custom:offload=all), or offload='optimizer'"
    ]


def build_offload_policy(offload: str, device: torch.device) -> OffloadPolicy:
    """What FSDP2 takes for `offload`. Where the device is the host there is nothing to offload.

    Host memory is pinned, so that copies overlap with computation, where there is an accelerator to pin it for:
    `CPUOffloadPolicy()` without one raises.
    """
    if offload != "all" or device.type == "cpu":
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=True)


class OffloadedState:
    """Keeps the state of an optimizer in host memory, but for the time of its update; `detach` ends it.

    Forward and backward have the device for themselves. The update needs the room of the state once activations are
    freed, and two copies of it travel in each.

    Args:
        optimizer: The user's; its parameters stay on the device.
        to_host: Moves a tensor of the state away.
        to_device: Moves a tensor of the state to where its parameter, the second argument, is.

    Example:
        >>> offloaded = OffloadedState(optimizer)
        >>> optimizer.step()
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        to_host: Callable[[Tensor], Tensor] | None = None,
        to_device: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._to_host = to_host or _to_host
        self._to_device = to_device or (lambda value, parameter: value.to(parameter.device, non_blocking=True))
        self._handles = register_update_hooks(optimizer, before=self.load, after=self.store)
        self.store()

    @torch.no_grad()
    def load(self) -> None:
        """Bring the state to the device."""
        self._move(self._to_device)

    @torch.no_grad()
    def store(self) -> None:
        """Bring the state to the host. Counters, which have no dimension, stay where the optimizer put them."""
        self._move(lambda value, _: self._to_host(value))

    def detach(self) -> None:
        """Take the hooks off, with the state on the device."""
        for handle in self._handles:
            handle.remove()
        self.load()

    def _move(self, move: Callable[[Tensor, Tensor], Tensor]) -> None:
        for parameter, entries in self._optimizer.state.items():
            for name, value in entries.items():
                if isinstance(value, Tensor) and value.ndim:
                    entries[name] = move(value, parameter)


def _to_host(value: Tensor) -> Tensor:
    """A copy in host memory; blocking, because its source is freed at once."""
    return value if value.device.type == "cpu" else value.to("cpu")

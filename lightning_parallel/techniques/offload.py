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
    """Reasons why `offload` cannot be used where every rank has a whole copy of the module; empty if it can."""
    if offload != "all":
        return offload_violations(offload)
    return [
        "offload='all' brings parameters to the device layer by layer, which needs sharding; use fsdp_offload_custom "
        "(or fsdp_custom:offload=all), or offload='optimizer'"
    ]


def build_offload_policy(offload: str, device: torch.device) -> OffloadPolicy:
    """Build FSDP2's policy for `offload`; where the device is the host, there is nothing to offload.

    Host memory is pinned, so that copies overlap with computation. Without an accelerator to pin it for,
    `CPUOffloadPolicy()` raises.

    Args:
        offload: One of `OFFLOADS`.
        device: This rank's device.
    """
    if offload != "all" or device.type == "cpu":
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=True)


class OffloadedState:
    """Optimizer state that is kept in host memory except during the update; `detach` ends it.

    Forward and backward have the device memory for themselves. Each update copies the state to the device, where
    activations are freed by then, and back.

    Args:
        optimizer: The user's; its parameters stay on the device.
        to_host: Copies a tensor of the state to the host.
        to_device: Copies a tensor of the state to the device of its parameter, the second argument.

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
        """Remove the hooks, and leave the state on the device."""
        for handle in self._handles:
            handle.remove()
        self.load()

    def _move(self, move: Callable[[Tensor, Tensor], Tensor]) -> None:
        for parameter, entries in self._optimizer.state.items():
            for name, value in entries.items():
                if isinstance(value, Tensor) and value.ndim:
                    entries[name] = move(value, parameter)


def _to_host(value: Tensor) -> Tensor:
    """Copy to host memory; blocking, because the source is freed at once."""
    return value if value.device.type == "cpu" else value.to("cpu")

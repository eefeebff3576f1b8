"""Keep optimizer state, or all state, in host memory.

Source: Rajbhandari et al. 2021, "ZeRO-Infinity"; `torch.distributed.fsdp.CPUOffloadPolicy`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_parallel import _torch
from lightning_parallel.module.optimizer_hooks import register_update_hooks
from lightning_parallel.ranks.dtensors import local_of

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
    activations are freed by then, and back. Host memory is pinned and used again, without which each copy would pass
    through a small buffer of the driver.

    Args:
        optimizer: The user's; its parameters stay on the device.
        host_memory: Makes memory for a tensor of the state on the host; ``None`` for one that is there, or has no such.
        to_device: Copies a tensor of the state to the device of its parameter, the second argument.

    Example:
        >>> offloaded = OffloadedState(optimizer)
        >>> optimizer.step()
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        host_memory: Callable[[Tensor], Tensor | None] | None = None,
        to_device: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._host_memory = host_memory or _pinned_memory
        self._to_device = to_device or _on_device
        # Parameter, name of the state -> its memory on the host.
        self._kept: dict[tuple[Tensor, str], Tensor] = {}
        self._handles = register_update_hooks(optimizer, before=self.load, after=self.store)
        self.store()

    @torch.no_grad()
    def load(self) -> None:
        """Bring the state to the device."""
        self._move(lambda _, value, parameter: self._to_device(value, parameter))

    @torch.no_grad()
    def store(self) -> None:
        """Bring the state to the host. Counters, which have no dimension, stay where the optimizer put them."""
        devices: set[torch.device] = set()

        def stored(name: str, value: Tensor, parameter: Tensor) -> Tensor:
            own = self._kept.get((parameter, name))
            if own is value:
                return value
            if own is None or not _are_alike(own, value):
                own = self._host_memory(value)
            if own is None:
                return value.to("cpu")
            self._kept[parameter, name] = own
            local_of(own).copy_(local_of(value), non_blocking=True)
            devices.add(value.device)
            return own

        self._move(stored)
        for device in devices:
            if device.type != "cpu":
                torch.accelerator.synchronize(device)  # whoever reads the state on the host would read half of it

    def detach(self) -> None:
        """Remove the hooks, and leave the state on the device."""
        for handle in self._handles:
            handle.remove()
        self.load()
        self._kept = {}

    def _move(self, move: Callable[[str, Tensor, Tensor], Tensor]) -> None:
        for parameter, entries in self._optimizer.state.items():
            for name, value in entries.items():
                if isinstance(value, Tensor) and value.ndim:
                    entries[name] = move(name, value, parameter)


def _on_device(value: Tensor, parameter: Tensor) -> Tensor:
    return value.to(parameter.device, non_blocking=True)


def _pinned_memory(value: Tensor) -> Tensor | None:
    """Make memory for `value` on the host, from and to which a device copies by itself.

    ``None`` if it is on the host, or is a tensor of another kind, as states of 8 bits are.
    """
    local = local_of(value)
    if value.device.type == "cpu" or type(local) is not Tensor:
        return None
    try:
        memory = torch.empty_like(local, device="cpu", pin_memory=True)
    except RuntimeError:  # as much as the machine lets a process pin; copies take longer then
        memory = torch.empty_like(local, device="cpu")
    return _torch.tensors.with_local(value, memory) if isinstance(value, DTensor) else memory


def _are_alike(one: Tensor, two: Tensor) -> bool:
    if type(one) is not type(two) or one.shape != two.shape or one.dtype != two.dtype:
        return False
    return local_of(one).shape == local_of(two).shape

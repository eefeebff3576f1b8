"""A plain copy that waits in host memory while the real step has the device for itself."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from lightning_parallel.ranks.memory import free_memory, has_own_memory, release_cached

_HOST = torch.device("cpu")


class ParkedCopy:
    """Parameters and gradients of a copy, in host memory from `park` to `fetch`; on the host they stay where they are.

    A batch is chosen so that a step fills its device. With a copy of the module and its gradients beside it, the first
    step would run out of memory, and none of those that follow.

    Args:
        device: This rank's device.
        num_processes: Those of this machine, which park as much.

    Example:
        >>> parked = ParkedCopy(torch.device("cuda"), num_processes=8)
        >>> parked.park(copy, module, gradients)
        >>> parked.fetch()  # before any of them is used
    """

    def __init__(self, device: torch.device, num_processes: int = 1) -> None:
        self._device, self._num_processes = device, num_processes
        self._away: list[Tensor] = []

    @torch.no_grad()
    def park(self, copy: nn.Module, original: nn.Module, gradients: Iterable[Tensor]) -> None:
        """Bring them to host memory, if there is room, and give what they have taken back to the device.

        Not the buffers, of which a step may hold views, and not the parameters that the copy shares with the module.

        Args:
            copy: The copy.
            original: The module.
            gradients: Those of the copy, some of them perhaps twice.
        """
        assert not self._away
        if not has_own_memory(self._device):
            return
        theirs = {id(parameter) for parameter in original.parameters()}
        tensors = [*(parameter for parameter in copy.parameters() if id(parameter) not in theirs), *gradients]
        there = {id(t): t for t in tensors if t.device.type == self._device.type and t.layout is torch.strided}
        if self._num_processes * sum(tensor.nbytes for tensor in there.values()) > free_memory(_HOST) // 2:
            return
        for tensor in there.values():
            tensor.data = to_host(tensor.data)
            self._away.append(tensor)
        release_cached(self._device)

    @torch.no_grad()
    def fetch(self) -> None:
        """Bring back what is parked, if anything is."""
        away, self._away = self._away, []
        for tensor in away:
            tensor.data = to_device(tensor.data, self._device)


def to_host(data: Tensor) -> Tensor:
    """Copy to host memory."""
    return data.to("cpu")


def to_device(data: Tensor, device: torch.device) -> Tensor:
    """Copy to `device`."""
    return data.to(device)

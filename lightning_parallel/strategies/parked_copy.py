"""A plain copy that waits in host memory while the real step has the device for itself."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from lightning_parallel.ranks.memory import has_own_memory, release_cached


class ParkedCopy:
    """Tensors that are in host memory from `park` to `fetch`; where the device is the host, they stay.

    A batch is chosen so that a step fills its device. With a copy of the module and its gradients beside it, the first
    step would run out of memory, and none of those that follow.

    Args:
        device: This rank's device.

    Example:
        >>> parked = ParkedCopy(torch.device("cuda"))
        >>> parked.park(copy.parameters())
        >>> parked.fetch()  # before any of them is used
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._away: list[Tensor] = []

    @torch.no_grad()
    def park(self, tensors: Iterable[Tensor]) -> None:
        """Bring tensors to host memory, and give what they have taken back to the device.

        Args:
            tensors: On the device or not, some of them perhaps twice.
        """
        assert not self._away
        if not has_own_memory(self._device):
            return
        for tensor in {id(tensor): tensor for tensor in tensors}.values():
            if tensor.device.type == self._device.type and tensor.layout is torch.strided:
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

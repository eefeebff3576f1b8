"""The device on which `configure_model` makes tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from lightning.pytorch.strategies import Strategy


@contextmanager
def tensors_on_host(strategy: Strategy, empty_init: bool | None = None) -> Iterator[None]:
    """Make new tensors on the host here, where Lightning makes them on the rank's device.

    A module that is going to be sharded would be whole there first.

    Args:
        strategy: The strategy, whose precision decides on the dtype.
        empty_init: Whether to leave parameters without their first values.
    """
    with Strategy.tensor_init_context(strategy, empty_init), torch.device("cpu"):
        yield

"""One layer whose linear maps are split: what runs between them, and how hidden states pass in and out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_map_only

from lightning_parallel import _torch
from lightning_parallel.module.hidden_states import Lengths
from lightning_parallel.module.placeholders import is_placeholder
from lightning_parallel.techniques.tensor.attention import HeadSplit
from lightning_parallel.techniques.tensor.regions import ReplicatedRegion


class Flow:
    """What runs between the maps of layers of one kind: local tensors, or DTensors.

    Args:
        path: Where the first of these layers is.
        mesh: The ranks that share a matrix product.
        peers: All ranks that hold these layers: they choose alike.
    """

    def __init__(self, path: str, mesh: DeviceMesh, peers: ProcessGroup) -> None:
        self.path = path
        self.mesh = mesh
        self.peers = peers
        self.is_local = True
        self.is_checked = False

    def as_part(self, local: Tensor) -> Tensor:
        """What a map by columns hands on: `local`, or a DTensor that knows of the other ranks' parts."""
        if self.is_local:
            return local
        return DTensor.from_local(local, self.mesh, [Shard(local.ndim - 1)], run_check=False)


class SplitLayer:
    """One layer: how it runs.

    Args:
        path: Where it is.
        flow: What runs between its maps.
        region: How hidden states pass into its branches and out of them.
        lengths: What is cut along the sequence, if anything is.
    """

    def __init__(self, path: str, flow: Flow, region: ReplicatedRegion, lengths: Lengths | None) -> None:
        self.path = path
        self.flow = flow
        self.region = region
        self.lengths = lengths
        self.is_whole = False  # while it is its unsplit self

    def run(self, layer: nn.Module, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The layer on hidden states as they are between layers."""
        if self.is_whole:
            return function(*args, **kwargs)
        if not self.flow.is_local:
            return self._run_on_dtensors(layer, function, args, kwargs)
        with _torch.attention.slow_attention():
            return self.region.run_layer(layer, function, args, kwargs)

    @_torch.modes.not_compiled  # torch 2.13 computes something else once it has compiled as many frames as it may
    def _run_on_dtensors(self, layer: nn.Module, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with _torch.attention.slow_attention(), HeadSplit(self.flow.mesh, self.region):
            output = self.region.run_layer(layer, function, args, kwargs)
        return tree_map_only(DTensor, _result, output)

    @contextlib.contextmanager
    def unsplit(self) -> Iterator[None]:
        """Inside this context, it is its unsplit self, with whatever stands for its parameters."""
        self.is_whole = True
        try:
            yield
        finally:
            self.is_whole = False

    def is_unsplit(self, weight: Tensor) -> bool:
        """Whether a map with `weight` runs as it is: for comparison, or to show a pipeline what it returns."""
        return self.is_whole or is_placeholder(weight)

    def branch(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A submodule in which a branch begins."""
        return function(*args, **kwargs) if self.is_whole else self.region.run_branch(function, args, kwargs)


def _result(tensor: Any) -> Any:
    whole = tensor.full_tensor()
    return whole.clone() if whole._is_view() else whole  # FSDP2 refuses a view, which may be written into

"""One layer whose linear maps are split: the kind of tensors between them, and the way it runs."""

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
from lightning_parallel.module.collected import collected_from_now
from lightning_parallel.module.hidden_states import Lengths
from lightning_parallel.module.placeholders import is_placeholder
from lightning_parallel.techniques.tensor.attention import HeadSplit
from lightning_parallel.techniques.tensor.regions import ReplicatedRegion

Product = Callable[[Tensor, Tensor], Tensor]
"""From `[..., inputs]` and a weight `[outputs, inputs]` to `[..., outputs]`."""


class Flow:
    """Kind of the tensors between maps, local tensors or DTensors, chosen once for layers that compute alike.

    Args:
        path: The path of the first of these layers.
        mesh: The ranks that share a matrix product.
        peers: All ranks that hold these layers, and have to make the same choice.
    """

    def __init__(self, path: str, mesh: DeviceMesh, peers: ProcessGroup) -> None:
        self.path = path
        self.mesh = mesh
        self.peers = peers
        self.is_local = True
        self.is_checked = False
        self.has_checked_gradients = False  # those of all that layers are given; in evaluation, few have any

    def as_part(self, local: Tensor) -> Tensor:
        """Return a column-parallel output, `[..., outputs / ranks]`, as it is or as a DTensor of all parts."""
        if self.is_local:
            return local
        return DTensor.from_local(local, self.mesh, [Shard(local.ndim - 1)], run_check=False)


class SplitLayer:
    """State of one layer, which says how it runs.

    Args:
        path: The layer's path in the module.
        flow: The kind of tensors between its maps.
        region: The collectives by which hidden states enter and leave its branches.
        lengths: Lengths of the sequences that are split at the moment, if any are.
    """

    def __init__(self, path: str, flow: Flow, region: ReplicatedRegion, lengths: Lengths | None) -> None:
        self.path = path
        self.flow = flow
        self.region = region
        self.lengths = lengths
        self.is_whole = False  # while it is its unsplit self

    def run(self, layer: nn.Module, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the layer on hidden states as they are between layers.

        Args:
            layer: The layer.
            function: Its forward.
            args: Its arguments.
            kwargs: Those by name.
        """
        if self.is_whole:
            return function(*args, **kwargs)
        if not self.flow.is_local:
            return self._run_on_dtensors(layer, function, args, kwargs)
        with _torch.attention.slow_attention():
            return self.region.run_layer(layer, function, args, kwargs)

    # Not compiled: torch 2.13 computes wrong results here once it has reached its limit of recompilations.
    @_torch.modes.not_compiled
    def _run_on_dtensors(self, layer: nn.Module, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        collected = collected_from_now()
        with _torch.attention.slow_attention(), HeadSplit(self.flow.mesh, self.region):
            output = self.region.run_layer(layer, function, args, kwargs)
        if collected is not None:
            collected.replace(lambda entry: _result(entry) if isinstance(entry, DTensor) else entry)
        return tree_map_only(DTensor, _result, output)

    @contextlib.contextmanager
    def unsplit(self) -> Iterator[None]:
        """Inside this context, the layer runs unsplit, with whole tensors in the place of its parameters."""
        self.is_whole = True
        try:
            yield
        finally:
            self.is_whole = False

    def is_unsplit(self, weight: Tensor) -> bool:
        """Whether a map with `weight` runs unsplit: for comparison, or on a placeholder of another pipeline stage."""
        return self.is_whole or is_placeholder(weight)

    def branch(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a submodule in which a branch begins.

        Args:
            function: Its forward.
            args: Its arguments.
            kwargs: Those by name.
        """
        return function(*args, **kwargs) if self.is_whole else self.region.run_branch(function, args, kwargs)


def _result(tensor: Any) -> Any:
    whole = tensor.full_tensor()
    # FSDP2 refuses a result that is a view, because it may be written in place.
    return whole.clone() if whole._is_view() else whole

"""Collectives of a step, counted where torch dispatches them: by kind, with the bytes of their whole tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
_KINDS = {
    "reduce_scatter": "reduce-scatter",
    "allgather": "all-gather",
    "all_gather": "all-gather",
    "allreduce": "all-reduce",
    "all_reduce": "all-reduce",
    "alltoall": "all-to-all",
    "all_to_all": "all-to-all",
    "broadcast": "broadcast",
    "barrier": "barrier",
    "scatter": "scatter",
    "gather": "gather",
    "reduce": "reduce",
    "send": "send",
}
"""Part of torch's name, which differs between versions -> the kind; the first that fits counts."""
_WITHOUT_BYTES = ("barrier",)
_LEFT_OUT = ("wait", "recv")
"""A wait sends nothing, and what is received is counted where it is sent."""


class CollectiveCount(TorchDispatchMode):
    """Counts the collectives of this rank while it is on, those of DDP's and FSDP2's own hooks included.

    All of torch's collectives pass the dispatcher, whether they are called by `torch.distributed`, by DTensor, or by
    DDP's reducer in C++. Bytes are those of the larger side: what an all-gather yields, what a reduce-scatter is given.

    Attributes:
        found: Kind -> the number of calls, and their bytes together.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, tuple[int, int]] = {}

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace in _NAMESPACES and (kind := _kind_of(func.overloadpacket.__name__)):
            number, total = self.found.get(kind, (0, 0))
            size = 0 if kind in _WITHOUT_BYTES else max(_bytes_in(each) for each in (*args, result))
            self.found[kind] = number + 1, total + size
        return result


def num_calls(found: Mapping[str, Sequence[int]]) -> int:
    """All calls together."""
    return sum(number for number, _ in found.values())


def num_bytes(found: Mapping[str, Sequence[int]]) -> int:
    """The bytes of all calls together."""
    return sum(size for _, size in found.values())


def _kind_of(name: str) -> str:
    if any(part in name for part in _LEFT_OUT):
        return ""
    return next((kind for part, kind in _KINDS.items() if part in name), name)


def _bytes_in(value: Any) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(value) if isinstance(leaf, Tensor))

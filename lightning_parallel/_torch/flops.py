"""FLOPs of what runs, by torch's own counter: those of the model, and those that backward computes again."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import graph
from torch.utils import checkpoint, flop_counter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from typing_extensions import override

_ATEN = torch.ops.aten
_SCORES = {
    "_scaled_dot_product_efficient_attention_backward": 1,
    "_scaled_dot_product_flash_attention_backward": 1,
    "_scaled_dot_product_cudnn_attention_backward": 1,
    "_scaled_dot_product_flash_attention_for_cpu_backward": 1,
    "_flash_attention_backward": 1,
    "_efficient_attention_backward": 1,
    "flex_attention_backward": 0,
}
"""Kernels that compute the scores of attention again in backward -> the place of the query in their arguments."""
_OWN_FORMULAS = {
    "_scaled_dot_product_flash_attention_for_cpu": "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu_backward": "_scaled_dot_product_flash_attention_backward",
}
"""Kernels without a formula in torch -> those that have the same shapes and products."""
_PLAIN = ("aten", "prim", "prims", "profiler", "fsdp")
"""Namespaces, besides those of collectives, whose products have a formula, but for those of the next table."""
_RECURRENT = ("mkldnn_rnn_layer", "mkldnn_rnn_layer_backward", "_cudnn_rnn", "_cudnn_rnn_backward", "miopen_rnn")


class FlopCount:
    """Counts floating-point operations of matrix products, convolutions and attention on this thread while it is on.

    Attention has four products in backward, as the formulas of PaLM and llm-foundry have it: the fifth, with which
    fused kernels compute the scores once more, counts as `again`. A mask takes nothing off.

    Attributes:
        model: Those of forward and backward.
        again: Those that backward computes again: `torch.utils.checkpoint`, and scores of attention.
        unknown: Names of operations that have no formula; each may be more than none.
        is_paused: Whether nothing counts now.

    `torch.utils.flop_counter.flop_registry`, since 2.1, and `torch._C._current_graph_task_id`, since 2.0; they wait for
    a counter that knows recomputation.

    Example:
        >>> with FlopCount() as count:
        ...     model(batch).sum().backward()
    """

    def __init__(self) -> None:
        self.model = 0.0
        self.again = 0.0
        self.unknown: set[str] = set()
        self.is_paused = False
        self._names = _Unknown(self)
        self._counter: FlopCounterMode | None = None

    def __enter__(self) -> FlopCount:
        formulas = {packet: self._noted(packet, formula) for packet, formula in _formulas().items()}
        self._counter = FlopCounterMode(display=False)
        self._counter.flop_registry = formulas
        self._counter.mod_tracker = _NoTracker()  # type: ignore[assignment]
        self._counter.__enter__()
        self._names.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        if self._counter is not None:
            self._names.__exit__(None, None, None)
            self._counter.__exit__(None, None, None)
            self._counter = None

    def _noted(self, packet: Any, formula: Callable[..., int]) -> Callable[..., int]:
        name = _name(packet)

        def note(*args: Any, **kwargs: Any) -> int:
            if self.is_paused:
                return 0
            try:
                found = formula(*args, **kwargs)
            except Exception:  # a formula that does not fit must not end a training
                self.unknown.add(name)
                return 0
            if _is_computed_again():
                self.again += found
                return found
            scores = 0.0 if name not in _SCORES else found * _share_of_scores(args, _SCORES[name])
            self.model += found - scores
            self.again += scores
            return found

        return note


class _NoTracker:
    """Knows no modules: torch's tracker hooks the inputs of all of them, with which `torch.autograd.grad` fails."""

    parents = frozenset({"Global"})

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, *_: object) -> None:
        """Do nothing."""


class _Unknown(TorchDispatchMode):
    """Notes operations for which nobody has a formula."""

    supports_higher_order_operators = True

    def __init__(self, count: FlopCount) -> None:
        super().__init__()
        self._count = count

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = getattr(func, "overloadpacket", func)
        if not self._count.is_paused and packet not in flop_counter.flop_registry:
            name = _name(packet)
            namespace = str(getattr(func, "namespace", ""))
            if name in _RECURRENT or not (namespace in _PLAIN or "c10d" in namespace):
                self._count.unknown.add(name)
        return func(*args, **(kwargs or {}))


def _formulas() -> dict[Any, Callable[..., int]]:
    found = dict(flop_counter.flop_registry)
    for name, like in _OWN_FORMULAS.items():
        packet = getattr(_ATEN, name, None)
        if packet is not None and packet not in found:
            found[packet] = found[getattr(_ATEN, like)]
    return found


def _name(packet: Any) -> str:
    return str(getattr(packet, "__name__", packet))


def _share_of_scores(args: Any, query: int) -> float:
    """The share of the products in an attention's backward that compute scores: 1/5 for heads of one size."""
    keys, values = int(args[query].shape[-1]), int(args[query + 2].shape[-1])
    return keys / (3 * keys + 2 * values)


def _is_computed_again() -> bool:
    """Whether this is a forward that `torch.utils.checkpoint` runs within a backward.

    Gradients are on there, as in a backward that makes a graph of its own, in a checkpoint perhaps: only the order of
    calls tells them apart.
    """
    if torch._C._current_graph_task_id() == -1 or not torch.is_grad_enabled():
        return False
    is_in_graph, is_in_checkpoint, frame = False, False, inspect.currentframe()
    while frame is not None:  # outwards
        if frame.f_code.co_filename == checkpoint.__file__:
            if not is_in_graph:
                return True
            is_in_checkpoint = True
        elif frame.f_code.co_filename == graph.__file__:
            if is_in_checkpoint:
                return True
            is_in_graph = True
        frame = frame.f_back  # type: ignore[assignment]
    return False

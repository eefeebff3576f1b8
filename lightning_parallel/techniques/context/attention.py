"""Attention of layers that hold parts of sequences."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from lightning_parallel import _torch
from lightning_parallel.techniques.context import ring, ulysses
from lightning_parallel.techniques.context.cut_rules import (
    CutRule,
    PartOfTables,
    is_count_of_part,
    positions_of_part,
    positions_of_whole,
    sizes_of_whole,
)
from lightning_parallel.techniques.context.sequences import Sequences

ATTENTIONS: dict[str, Callable[..., Tensor]] = {"ulysses": ulysses.attend, "ring": ring.attend}
"""Name -> `scaled_dot_product_attention` of parts; takes a `Sequences` before the usual arguments."""

_attention = functional.scaled_dot_product_attention
_OF_TORCH = (_attention, functional.multi_head_attention_forward)
_OF_PAIRS = (torch.zeros, Tensor.view)
_WEIGHING = (functional.softmax, torch.softmax, Tensor.softmax)


class SplitAttention(TorchFunctionMode):
    """Mode in which each rank has a part of the sequences, and attention is over whole ones.

    A function mode sees calls under every spelling, also ``from torch.nn.functional import ...``.

    Args:
        name: The kind of attention, of :data:`ATTENTIONS`.
        sequences: The ranks, and the lengths of the sequences that they share.
        rule: Says which buffers and counts of positions are cut, too.
        tables: The layer's buffers, which are cut if `rule` says so.
    """

    def __init__(self, name: str, sequences: Sequences, *, rule: CutRule, tables: PartOfTables) -> None:
        super().__init__()
        self._attend = ATTENTIONS[name]
        self._sequences = sequences
        self.rule = rule
        self._tables = tables
        self.calls = 0
        self.counted = 0
        self._depth = 0

    def __enter__(self) -> Self:
        if self.rule.buffers and not self._depth:
            self._tables.enter()
        self._depth += 1
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._depth -= 1
        if self.rule.buffers and not self._depth:
            self._tables.leave()

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `function` so that it enters this mode when backward runs it again, as activation checkpointing does."""

        @functools.wraps(function)
        def entering(*args: Any, **kwargs: Any) -> Any:
            if self._depth:
                return function(*args, **kwargs)
            with self:
                return function(*args, **kwargs)

        return entering

    @_torch.modes.part_of_graphs_only
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _attention:
            return self._shared(*args, **(kwargs or {}))
        if func is functional.multi_head_attention_forward:
            # A mode is off while it handles a call, so it would not see the attention inside this one.
            with _torch.attention.attention_replaced(self._shared):
                return func(*args, **(kwargs or {}))
        is_counting = self.rule.counts or self.rule.pairs
        if is_counting and func is torch.arange and is_count_of_part(self._sequences, args, kwargs or {}):
            self.counted += 1
            positions = positions_of_whole if self.rule.pairs else positions_of_part
            return positions(self._sequences, args, kwargs or {})
        if self.rule.pairs and func in _OF_PAIRS:
            args = sizes_of_whole(self._sequences, func, args)
        return func(*args, **(kwargs or {}))

    # Not compiled: there is only one kernel between exchanges to gain from, and queries, keys and values differ in
    # strides, so that each would be compiled anew.
    @_torch.modes.not_compiled
    def _shared(self, *args: Any, **kwargs: Any) -> Tensor:
        self.calls += 1
        return self._attend(self._sequences, *args, **kwargs)


class AttentionWatch(TorchFunctionMode):
    """Mode that notes whether code computes attention: ``"torch"``, ``"own"`` (then it calls softmax), or ``""``."""

    def __init__(self) -> None:
        super().__init__()
        self.kind = ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _OF_TORCH:
            self.kind = "torch"
        elif func in _WEIGHING:
            self.kind = self.kind or "own"
        return func(*args, **(kwargs or {}))

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
from lightning_parallel.techniques.context.cut_rules import CutRule, PartOfTables, is_count_of_part, positions_of_part
from lightning_parallel.techniques.context.sequences import Sequences

ATTENTIONS: dict[str, Callable[..., Tensor]] = {"ulysses": ulysses.attend, "ring": ring.attend}
"""Name -> `scaled_dot_product_attention` of parts, with the sequences before its arguments."""

_attention = functional.scaled_dot_product_attention


class SplitAttention(TorchFunctionMode):
    """Inside this context, attention is that of whole sequences, though each rank has a part.

    A mode of functions sees calls under every spelling, also ``from torch.nn.functional import ...``.

    Args:
        name: How the ranks share it, of :data:`ATTENTIONS`.
        sequences: Of which layers hold parts.
        rule: What else follows the part.
        tables: The layer's buffers, where `rule` says that they do.
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
        """`function`, entering this where it runs again in backward, as what a layer checkpoints does."""

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
            with _torch.attention.attention_replaced(self._shared):
                return func(*args, **(kwargs or {}))
        if self.rule.counts and func is torch.arange and is_count_of_part(self._sequences, args, kwargs or {}):
            self.counted += 1
            return positions_of_part(self._sequences, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    @_torch.modes.not_compiled  # between exchanges there is one kernel; queries, keys and values differ in strides
    def _shared(self, *args: Any, **kwargs: Any) -> Tensor:
        self.calls += 1
        return self._attend(self._sequences, *args, **kwargs)

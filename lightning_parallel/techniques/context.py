"""Context parallel: each rank holds a part of every sequence inside the layer stacks. Layer 2.

Source: Jacobs et al. 2023, "DeepSpeed Ulysses". Outside of the stacks sequences are whole on every rank, so positions,
labels and the loss are those of one device. At a stack's entry they are split; around attention, ranks exchange
sequence for heads, so that each attends over whole sequences with its part of the heads; at the exit they are gathered.

Nothing of this is taken on trust: when a stack runs for the first time, the split result of its first layer is compared
with the whole one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from lightning_parallel import _torch
from lightning_parallel.caches import is_cache, without_fresh_cache
from lightning_parallel.errors import ConfigurationError
from lightning_parallel.exchange import exchange, gather, split
from lightning_parallel.hidden_states import Lengths, own_stream, take_hidden
from lightning_parallel.layer_probe import probing

_attention = F.scaled_dot_product_attention
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4}
_TOLERANCE_OF_HALF = 5e-2


def apply_context(stacks: Sequence[Sequence[tuple[str, nn.Module]]], group: ProcessGroup) -> list[Lengths]:
    """Let the layers of each stack work on a part of the sequence, in place. Names in the state dict stay.

    Args:
        stacks: For each stack its layers with their paths, in the order in which they run.
        group: The ranks that share a sequence.

    Returns:
        The lengths of sequences that are cut, for each stack.
    """
    split = [SplitStack(group) for _ in stacks]
    for stack, layers in zip(split, stacks, strict=True):
        for index, (path, layer) in enumerate(layers):
            part = _Part(path, stack, is_first=index == 0, is_last=index == len(layers) - 1)
            layer.__class__ = _splitting(type(layer), part)
    return [stack.lengths for stack in split]


def _splitting(cls: type[Any], part: _Part) -> type[nn.Module]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return part.run(self, functools.partial(cls.forward, self), args, kwargs)

    return _torch.subclass_like(cls, forward)


class SplitStack:
    """What the layers of one stack share: the ranks, and how the sequence is split that runs through it now.

    Args:
        group: The ranks that share a sequence.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.num_ranks = group.size()
        self.rank = group.rank()
        self.lengths = Lengths(self.num_ranks)
        self.is_checked = False


@dataclass(frozen=True)
class _Part:
    """How one layer of a stack runs."""

    path: str
    stack: SplitStack
    is_first: bool
    is_last: bool

    def run(
        self,
        layer: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        attention: _Ulysses | None = None,
    ) -> Any:
        hidden, args, kwargs = take_hidden(args, kwargs)
        # A cache would hold parts of sequences; Hugging Face's layers fill one in training, too, and nobody reads it.
        args = tuple(without_fresh_cache(layer, args))
        kwargs = dict(zip(kwargs, without_fresh_cache(layer, kwargs.values()), strict=True))
        if any(is_cache(value) for value in (*args, *kwargs.values())):
            raise ConfigurationError(
                [
                    f"{self.path} ({_torch.class_name(layer)}) is given a cache of keys and values that holds whole "
                    "sequences, to which a part cannot attend; give context=1"
                ]
            )
        if self.is_first:
            if not self.stack.is_checked:
                self._check(layer, forward, hidden, args, kwargs)
            hidden = self._split_entry(hidden)
        length = self._whole_length(hidden)
        split_argument = functools.partial(self._split_argument, length=length, hidden=hidden)
        args = tuple(_map_named(split_argument, "", value) for value in args)
        kwargs = {name: _map_named(split_argument, name, value) for name, value in kwargs.items()}
        attention = attention or _Ulysses(self.stack)
        with (
            own_stream(self.stack.group, is_needed=layer.training and torch.is_grad_enabled()),
            _torch.slow_attention(),
            attention,
        ):
            output = forward(hidden, *args, **kwargs)
        if not attention.calls:
            raise ConfigurationError([_bypassed(self.path, layer)])
        return self._gather_exit(output) if self.is_last else output

    def _split_entry(self, hidden: Tensor) -> Tensor:
        local = self.stack.lengths.add(hidden.shape[self.stack.lengths.dim])
        return split(hidden, self.stack.lengths.dim, local, self.stack.group)

    def _gather_exit(self, output: Any) -> Any:
        if isinstance(output, tuple):
            return (self._gather_exit(output[0]), *output[1:])
        return gather(output, self.stack.lengths.dim, self._whole_length(output), self.stack.group)

    def _whole_length(self, part: Tensor) -> int:
        lengths = self.stack.lengths.whole
        if part.shape[self.stack.lengths.dim] not in lengths:
            raise ConfigurationError(
                [
                    f"{self.path}: hidden states of shape {tuple(part.shape)} are no part of a sequence that was split "
                    f"at the stack's entry (parts of length {', '.join(map(str, lengths)) or 'none'}): the layers do "
                    "not run one after the other from first to last; give context=1"
                ]
            )
        return lengths[part.shape[self.stack.lengths.dim]]

    def _split_argument(self, name: str, value: Any, *, length: int, hidden: Tensor) -> Any:
        """Split what runs along the sequence: positions, rotary tables, a second sequence. Masks stay whole."""
        if not isinstance(value, Tensor):
            return value
        if "mask" in name and "padding" not in name:
            return value
        if value.ndim == hidden.ndim and value.shape[-1] == hidden.shape[-1] and value.is_floating_point():
            length = value.shape[self.stack.lengths.dim]  # another sequence of hidden states, such as an encoder's
            dims = [self.stack.lengths.dim]
        else:
            dims = [dim for dim, size in enumerate(value.shape) if size == length]
        if len(dims) != 1:
            return value
        return split(value, dims[0], self.stack.lengths.add(length), self.stack.group)

    # The check --------------------------------------------------------------------------------------------------

    def _check(
        self, layer: nn.Module, forward: Callable[..., Any], hidden: Tensor, args: tuple[Any, ...], kwargs: Any
    ) -> None:
        """Compare the layer on parts of the sequence with itself on the whole, once, without dropout.

        Raises:
            ConfigurationError: If they differ, with where the difference begins.
        """
        self.stack.is_checked = True
        alone = _Part(self.path, self.stack, is_first=True, is_last=True)
        messages = []
        for doubles in (True, False):
            arguments = ((hidden, *args), kwargs)
            with torch.no_grad(), _torch.slow_attention(), probing(layer, arguments, doubles=doubles) as (given, named):
                try:
                    whole = _first(forward(*given, **named))
                except Exception:
                    if doubles:
                        continue  # not everything computes in fp64
                    raise
                for dim in _sequence_dims(layer):
                    self.stack.lengths.dim = dim
                    messages.append(self._compare(alone, layer, forward, given, named, whole))
                    if not messages[-1]:
                        break
                break
        self.stack.lengths.forget()
        if messages[-1]:
            raise ConfigurationError(messages[:1])

    def _compare(
        self,
        alone: _Part,
        layer: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Any,
        whole: Tensor,
    ) -> str:
        attention = _Ulysses(self.stack)
        try:
            ours = _first(alone.run(layer, forward, args, kwargs, attention))
        except (RuntimeError, AssertionError, IndexError) as error:
            if not attention.calls:
                return _bypassed(self.path, layer)
            return (
                f"{self.path} ({_torch.class_name(layer)}) fails on a part of the sequence: {error}. Shapes, masks or "
                "positions that it makes by itself are those of whole sequences; give context=1"
            )
        return _difference(self.path, layer, ours, whole, self.stack.lengths.dim)


def _sequence_dims(layer: nn.Module) -> list[int]:
    """Which dimension of hidden states may be the sequence, the likelier one first."""
    is_batch_first = all(c.batch_first for c in layer.modules() if isinstance(c, nn.MultiheadAttention))
    return [1, 0] if is_batch_first else [0, 1]


def _map_named(function: Callable[[str, Any], Any], name: str, value: Any) -> Any:
    return tree_map(functools.partial(function, name), value)


def _first(output: Any) -> Tensor:
    first: Tensor = output[0] if isinstance(output, tuple) else output
    return first


def _difference(path: str, layer: nn.Module, ours: Tensor, whole: Tensor, dim: int) -> str:
    """In words, where the split layer differs from the whole one; empty if it does not."""
    start = f"context parallel changes what {path} ({_torch.class_name(layer)}) computes"
    if ours.shape != whole.shape:
        return f"{start}: {tuple(ours.shape)} in place of {tuple(whole.shape)}; give context=1"
    allowed = _TOLERANCE.get(whole.dtype, _TOLERANCE_OF_HALF) * float(whole.abs().max().clamp(min=1e-6))
    errors = (ours - whole).abs().float()
    if float(errors.max()) <= allowed:
        return ""
    positions = errors.amax([d for d in range(errors.ndim) if d != dim])
    begin = int((positions > allowed).nonzero()[0])
    return (
        f"{start}: by {float(errors.max()):.2g} where {allowed:.2g} is allowed, from position {begin} of "
        f"{len(positions)} on. A layer that makes positions by itself, or mixes positions outside of "
        "scaled_dot_product_attention, cannot work on a part of the sequence; give it positions as an argument, or "
        "give context=1"
    )


def _bypassed(path: str, layer: nn.Module) -> str:
    return (
        f"{path} ({_torch.class_name(layer)}) does not call torch's scaled_dot_product_attention, around which "
        "context parallel exchanges heads for positions; for Hugging Face models give attn_implementation='sdpa', for "
        "nn.MultiheadAttention need_weights=False, or give context=1"
    )


# Attention ----------------------------------------------------------------------------------------------------------


class _Ulysses(TorchFunctionMode):
    """While it is entered, attention is over whole sequences, with this rank's part of the heads.

    A mode of functions sees calls under every spelling, also ``from torch.nn.functional import ...``.
    """

    def __init__(self, stack: SplitStack) -> None:
        super().__init__()
        self._stack = stack
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _attention:
            return self._attend(*args, **(kwargs or {}))
        if func is F.multi_head_attention_forward:
            with _torch.attention_replaced(self._attend):
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        self.calls += 1
        num_ranks = self._stack.num_ranks
        if violation := _head_violation(query, key, num_ranks):
            raise ConfigurationError([violation])
        repeats = max(1, num_ranks // key.shape[1])
        mask = None if attn_mask is None else self._mask(attn_mask, query, key)
        q = self._exchange_for_heads(query, 1)
        k, v = (self._exchange_for_heads(each, repeats) for each in (key, value))
        output = _attention(q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
        padding = query.shape[2] * num_ranks - output.shape[2]
        return exchange(F.pad(output, (0, 0, 0, padding)), 2, 1, self._stack.group)

    def _exchange_for_heads(self, states: Tensor, repeats: int) -> Tensor:
        """`[batch, heads, part, dim]` to `[batch, heads / ranks, whole, dim]`."""
        if repeats > 1:
            states = states.repeat_interleave(repeats, 1)
        length = self._stack.lengths.whole.get(states.shape[2])
        if length is None:  # whole on every rank already, such as keys of learned slots
            return states.chunk(self._stack.num_ranks, 1)[self._stack.rank]
        return exchange(states, 1, 2, self._stack.group).narrow(2, 0, length)

    def _mask(self, mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """The mask for whole sequences and this rank's heads."""
        for dim, states in ((-1, key), (-2, query)):
            local = states.shape[2]
            length = self._stack.lengths.whole.get(local, local)
            if mask.ndim >= -dim and mask.shape[dim] == local != length:
                mask = gather(mask, mask.ndim + dim, length, self._stack.group)
        if mask.ndim == 4 and mask.shape[1] == query.shape[1] > 1:
            mask = mask.chunk(self._stack.num_ranks, 1)[self._stack.rank]
        return mask


def _head_violation(query: Tensor, key: Tensor, num_ranks: int) -> str:
    if query.ndim != 4:
        return f"context={num_ranks} needs attention over [batch, heads, length, dim], but got {tuple(query.shape)}"
    heads, kv_heads = query.shape[1], key.shape[1]
    legal = [n for n in range(1, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
    if num_ranks in legal:
        return ""
    return (
        f"context={num_ranks} cannot share {heads} heads and {kv_heads} heads of keys and values (those that tensor "
        "parallel has left to a rank, if there is any); possible: "
        f"{', '.join(map(str, legal))}"
    )

"""Layers that work on a part of each sequence. Layer 2.

Nothing is taken on trust: when a stack runs for the first time, the split result of its first layer is compared with
the whole one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_map

from lightning_parallel import _torch
from lightning_parallel.caches import is_cache, without_fresh_cache
from lightning_parallel.errors import ConfigurationError
from lightning_parallel.hidden_states import Lengths, own_stream, take_hidden
from lightning_parallel.layer_probe import probing
from lightning_parallel.techniques.context.attention import SplitAttention
from lightning_parallel.techniques.context.comparison import bypassed, difference, failed, first_of, sequence_dims
from lightning_parallel.techniques.context.sequences import Sequences


def apply_context(
    stacks: Sequence[Sequence[tuple[str, nn.Module]]], group: ProcessGroup, *, attention: str = "ulysses"
) -> list[Lengths]:
    """Let the layers of each stack work on a part of the sequence, in place. Names in the state dict stay.

    Args:
        stacks: For each stack its layers with their paths, in the order in which they run.
        group: The ranks that share a sequence.
        attention: How they share attention, ``"ulysses"`` or ``"ring"``.

    Returns:
        The lengths of sequences that are cut, for each stack.
    """
    split = [_SplitStack(attention, Sequences(group, folds=attention == "ring")) for _ in stacks]
    for stack, layers in zip(split, stacks, strict=True):
        for index, (path, layer) in enumerate(layers):
            part = _Part(path, stack, is_first=index == 0, is_last=index == len(layers) - 1)
            layer.__class__ = _splitting(type(layer), part)
    return [stack.sequences.lengths for stack in split]


def _splitting(cls: type[Any], part: _Part) -> type[nn.Module]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return part.run(self, functools.partial(cls.forward, self), args, kwargs)

    return _torch.subclass_like(cls, forward)


@dataclass
class _SplitStack:
    """What the layers of one stack share."""

    attention: str
    sequences: Sequences
    is_checked: bool = False


@dataclass(frozen=True)
class _Part:
    """How one layer of a stack runs."""

    path: str
    stack: _SplitStack
    is_first: bool
    is_last: bool

    def run(
        self,
        layer: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        attention: SplitAttention | None = None,
    ) -> Any:
        sequences = self.stack.sequences
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
            hidden = sequences.cut(hidden, sequences.dim)
        length = self._whole_length(hidden)
        split_argument = functools.partial(self._split_argument, length=length, hidden=hidden)
        args = tuple(_map_named(split_argument, "", value) for value in args)
        kwargs = {name: _map_named(split_argument, name, value) for name, value in kwargs.items()}
        attention = attention or self._attention()
        with (
            own_stream(sequences.group, is_needed=layer.training and torch.is_grad_enabled()),
            _torch.slow_attention(),
            attention,
        ):
            output = forward(hidden, *args, **kwargs)
        if not attention.calls:
            raise ConfigurationError([bypassed(self.path, layer)])
        return self._gather_exit(output) if self.is_last else output

    def _attention(self) -> SplitAttention:
        return SplitAttention(self.stack.attention, self.stack.sequences)

    def _gather_exit(self, output: Any) -> Any:
        if isinstance(output, tuple):
            return (self._gather_exit(output[0]), *output[1:])
        self._whole_length(output)
        return self.stack.sequences.join(output, self.stack.sequences.dim)

    def _whole_length(self, part: Tensor) -> int:
        sequences = self.stack.sequences
        length = part.shape[sequences.dim]
        if not sequences.is_part(length):
            parts = ", ".join(map(str, sequences.lengths.whole)) or "none"
            raise ConfigurationError(
                [
                    f"{self.path}: hidden states of shape {tuple(part.shape)} are no part of a sequence that was split "
                    f"at the stack's entry (parts of length {parts}): the layers do not run one after the other from "
                    "first to last; give context=1"
                ]
            )
        return sequences.whole_length(length)

    def _split_argument(self, name: str, value: Any, *, length: int, hidden: Tensor) -> Any:
        """Split what runs along the sequence: positions, rotary tables, a second sequence. Masks stay whole."""
        if not isinstance(value, Tensor):
            return value
        if "mask" in name and "padding" not in name:
            return value
        sequences = self.stack.sequences
        if value.ndim == hidden.ndim and value.shape[-1] == hidden.shape[-1] and value.is_floating_point():
            dims = [sequences.dim]  # another sequence of hidden states, such as an encoder's
        else:
            dims = [dim for dim, size in enumerate(value.shape) if size == length]
        return sequences.cut(value, dims[0]) if len(dims) == 1 else value

    def _check(
        self, layer: nn.Module, forward: Callable[..., Any], hidden: Tensor, args: tuple[Any, ...], kwargs: Any
    ) -> None:
        """Compare the layer on parts of the sequence with itself on the whole, once, without dropout.

        Raises:
            ConfigurationError: If they differ, with where the difference begins.
        """
        self.stack.is_checked = True
        lengths = self.stack.sequences.lengths
        alone = _Part(self.path, self.stack, is_first=True, is_last=True)
        violations = []
        for doubles in (True, False):
            arguments = ((hidden, *args), kwargs)
            with torch.no_grad(), _torch.slow_attention(), probing(layer, arguments, doubles=doubles) as (given, named):
                try:
                    whole = first_of(forward(*given, **named))
                except Exception:
                    if doubles:
                        continue  # not everything computes in fp64
                    raise
                for dim in sequence_dims(layer):
                    lengths.dim = dim
                    violations.append(self._compare(alone, layer, forward, given, named, whole))
                    if not violations[-1]:
                        break
                break
        lengths.forget()
        if violations[-1]:
            raise ConfigurationError(violations[0])

    def _compare(
        self,
        alone: _Part,
        layer: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Any,
        whole: Tensor,
    ) -> list[str]:
        attention = self._attention()
        try:
            ours = first_of(alone.run(layer, forward, args, kwargs, attention))
        except ConfigurationError as error:
            return list(error.violations)
        except (RuntimeError, AssertionError, IndexError) as error:
            return [failed(self.path, layer, error) if attention.calls else bypassed(self.path, layer)]
        found = difference(self.path, layer, ours, whole, self.stack.sequences.dim)
        return [found] if found else []


def _map_named(function: Callable[[str, Any], Any], name: str, value: Any) -> Any:
    return tree_map(functools.partial(function, name), value)

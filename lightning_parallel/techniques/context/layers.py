"""Layers that work on a part of each sequence. Layer 2.

Nothing is taken on trust: when a layer runs for the first time, its result on parts is compared with that on the whole.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_map

from lightning_parallel import _torch
from lightning_parallel.caches import is_cache, without_fresh_cache
from lightning_parallel.errors import ConfigurationError, check
from lightning_parallel.exchange import same
from lightning_parallel.hidden_states import Lengths, own_stream, take_hidden
from lightning_parallel.layer_probe import probing
from lightning_parallel.techniques.context.attention import SplitAttention
from lightning_parallel.techniques.context.comparison import (
    batch_statistics_violations,
    bypassed,
    difference,
    failed,
    first_of,
    further_violations,
    sequence_dims,
)
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
    """What the layers of one stack share.

    Args:
        attention: How ranks share attention.
        sequences: What is cut now.
        checked: The paths of the layers that were compared with themselves.
        trained: The paths of the layers that were looked at in training.
    """

    attention: str
    sequences: Sequences
    checked: set[str] = field(default_factory=set)
    trained: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class _Part:
    """How one layer of a stack runs."""

    path: str
    stack: _SplitStack
    is_first: bool
    is_last: bool

    def run(self, layer: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The layer's result, of the arguments that the user's code gives it."""
        sequences = self.stack.sequences
        hidden, args, kwargs = take_hidden(args, kwargs)
        args, kwargs = self._without_caches(layer, args, kwargs)
        self._look(layer, forward, hidden, args, kwargs)
        if self.is_first:
            hidden = sequences.cut(hidden, sequences.dim)
        attention = self._attention()
        output = self._on_part(layer, forward, hidden, args, kwargs, attention)
        if not attention.calls:
            raise ConfigurationError([bypassed(self.path, layer)])
        return self._joined(output) if self.is_last else output

    def _without_caches(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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
        return args, kwargs

    def _on_part(
        self,
        layer: nn.Module,
        forward: Callable[..., Any],
        hidden: Tensor,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        attention: SplitAttention,
    ) -> Any:
        """The layer's result of a part of hidden states, and of whole other arguments."""
        sequences = self.stack.sequences
        length = self._whole_length(hidden)
        split_argument = functools.partial(self._split_argument, length=length, hidden=hidden)
        args = tuple(_map_named(split_argument, "", value) for value in args)
        kwargs = {name: _map_named(split_argument, name, value) for name, value in kwargs.items()}
        with (
            own_stream(sequences.group, is_needed=layer.training and torch.is_grad_enabled()),
            _torch.slow_attention(),
            _torch.checkpoints_replaced(attention.around),
            attention,
        ):
            return forward(hidden, *args, **kwargs)

    def _attention(self) -> SplitAttention:
        return SplitAttention(self.stack.attention, self.stack.sequences)

    def _joined(self, output: Any) -> Any:
        if isinstance(output, tuple):
            return (self._joined(output[0]), *output[1:])
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
        sequences = self.stack.sequences
        if "mask" in name and "padding" not in name:
            dims = []
        elif value.ndim == hidden.ndim and value.shape[-1] == hidden.shape[-1] and value.is_floating_point():
            other = value.shape[sequences.dim]
            if other != length and other == hidden.shape[sequences.dim]:
                return value  # what an earlier layer returned: a part already
            dims = [sequences.dim]  # another sequence of hidden states, such as an encoder's
        else:
            dims = [dim for dim, size in enumerate(value.shape) if size == length]
            if sequences.dim in dims:  # another size may happen to be the length
                dims = [sequences.dim]
        if len(dims) == 1:
            return sequences.cut(value, dims[0])
        return same(value, sequences.group) if value.requires_grad else value

    # Looking at layers ------------------------------------------------------------------------------------------

    @_torch.not_compiled
    def _look(
        self, layer: nn.Module, forward: Callable[..., Any], hidden: Tensor, args: tuple[Any, ...], kwargs: Any
    ) -> None:
        """What has to be true before the layer runs."""
        stack = self.stack
        if layer.training and self.path not in stack.trained:
            stack.trained.add(self.path)
            check(batch_statistics_violations(self.path, layer))
        if self.path not in stack.checked:
            stack.checked.add(self.path)
            self._compare_once(layer, forward, hidden, args, kwargs)
        if _torch.is_in_backward():  # a layer is computed again
            return
        lengths = stack.sequences.lengths
        if self.is_first:
            lengths.check_left()
            lengths.entered = self.path
        if self.is_last:
            lengths.entered = ""

    def _compare_once(
        self, layer: nn.Module, forward: Callable[..., Any], hidden: Tensor, args: tuple[Any, ...], kwargs: Any
    ) -> None:
        """Compare the layer on parts of the sequence with itself on the whole, without dropout.

        Raises:
            ConfigurationError: If they differ, with where the difference begins.
        """
        lengths = self.stack.sequences.lengths
        before, dims = dict(lengths.whole), [lengths.dim]
        with torch.no_grad(), _torch.without_dispatch_modes():
            if self.is_first:
                before, dims = {}, sequence_dims(layer)
            else:
                whole_of = functools.partial(self._whole_of, like=hidden, length=self._whole_length(hidden))
                hidden, args, kwargs = tree_map(whole_of, (hidden, args, kwargs))
        violations = []
        for doubles in (True, False):
            arguments = ((hidden, *args), kwargs)
            with torch.no_grad(), _torch.slow_attention(), probing(layer, arguments, doubles=doubles) as (given, named):
                try:
                    whole = forward(*given, **named)
                except Exception:
                    if doubles:
                        continue  # not everything computes in fp64
                    raise
                for dim in dims:
                    lengths.dim = dim
                    violations.append(self._differences(layer, forward, given, named, whole))
                    if not violations[-1]:
                        break
                break
        lengths.whole = before
        if violations[-1]:
            raise ConfigurationError(violations[0])

    def _whole_of(self, value: Any, *, like: Tensor, length: int) -> Any:
        """What is a part as `like` is, whole: hidden states, also those that an earlier layer returned."""
        dim = self.stack.sequences.dim
        is_like = isinstance(value, Tensor) and value.shape == like.shape and value.dtype == like.dtype
        return self.stack.sequences.join(value.detach(), dim) if is_like and like.shape[dim] != length else value

    def _differences(
        self, layer: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Any, whole: Any
    ) -> list[str]:
        attention, sequences = self._attention(), self.stack.sequences
        hidden, others = args[0], args[1:]
        try:
            part = self._on_part(layer, forward, sequences.cut(hidden, sequences.dim), others, kwargs, attention)
            ours = self._joined(part)
        except ConfigurationError as error:
            return list(error.violations)
        except (RuntimeError, AssertionError, IndexError) as error:
            return [failed(self.path, layer, error, has_attention=bool(attention.calls))]
        if not attention.calls:
            return [bypassed(self.path, layer)]
        found = difference(self.path, layer, first_of(ours), first_of(whole), sequences.dim)
        return [found] if found else further_violations(self.path, layer, ours, whole)


def _map_named(function: Callable[[str, Any], Any], name: str, value: Any) -> Any:
    return tree_map(functools.partial(function, name), value)

"""Layers that work on a part of each sequence. Layer 2.

Nothing is taken on trust: when a layer runs for the first time, its result on parts is compared with that on the whole.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_map

from lightning_parallel import _torch
from lightning_parallel.errors import ConfigurationError, check
from lightning_parallel.module.hidden_states import Lengths, sequence_part_stream, take_hidden
from lightning_parallel.module.kv_cache import is_cache, without_fresh_cache
from lightning_parallel.module.layer_check import probing
from lightning_parallel.techniques.context.attention import SplitAttention
from lightning_parallel.techniques.context.comparison import (
    ELSEWHERE,
    batch_statistics_violations,
    bypassed,
    counted_otherwise,
    difference,
    failed,
    first_of,
    further_violations,
    sequence_dims,
)
from lightning_parallel.techniques.context.cut_rules import (
    USUAL,
    CutRule,
    PartOfTables,
    candidate_rules,
    cut_argument,
    relations,
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
        last = len(layers) - 1
        parts = {
            layer: _Part(path, stack, is_first=index == 0, is_last=index == last)
            for index, (path, layer) in enumerate(layers)
        }
        # One class for all layers of a class: a compiler makes a graph for each.
        classes = {cls: _splitting(cls, parts) for cls in {type(layer) for layer in parts}}
        for layer in parts:
            layer.__class__ = classes[type(layer)]
    return [stack.sequences.lengths for stack in split]


def _splitting(cls: type[Any], parts: Mapping[nn.Module, _Part]) -> type[nn.Module]:
    @_torch.modes.not_compiled
    def part_of(layer: nn.Module) -> _Part:
        return parts[layer]

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return part_of(self).run(self, functools.partial(cls.forward, self), args, kwargs)

    return _torch.modules.subclass_like(cls, forward)


@dataclass(frozen=True)
class Verified:
    """A rule that was seen to be right, and how often the layer counted positions meanwhile."""

    rule: CutRule
    counted: int


@dataclass
class _SplitStack:
    """What the layers of one stack share.

    Args:
        attention: How ranks share attention.
        sequences: What is cut now.
        rules: How the layers run that were compared with themselves, by path and by what compares with the length.
        rule: The latest of these.
        trained: The paths of the layers that were looked at in training.
    """

    attention: str
    sequences: Sequences
    rules: dict[tuple[Any, ...], Verified] = field(default_factory=dict)
    rule: CutRule = USUAL
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
        verified = self._look(layer, forward, hidden, args, kwargs)
        if self.is_first:
            hidden = sequences.cut(hidden, sequences.dim)
        attention = self._attention(layer, hidden, verified.rule)
        output = self._on_part(layer, forward, hidden, args, kwargs, attention)
        if not attention.calls:
            raise ConfigurationError([bypassed(self.path, layer)])
        if attention.counted != verified.counted:
            raise ConfigurationError([counted_otherwise(self.path, layer)])
        return self._joined(output) if self.is_last else output

    def _without_caches(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # A cache would hold parts of sequences; Hugging Face's layers fill one in training, too, and nobody reads it.
        args = tuple(without_fresh_cache(layer, args))
        kwargs = dict(zip(kwargs, without_fresh_cache(layer, kwargs.values()), strict=True))
        if any(is_cache(value) for value in (*args, *kwargs.values())):
            raise ConfigurationError(
                [
                    f"{self.path} ({_torch.fsdp.class_name(layer)}) is given a cache of keys and values that holds "
                    "whole sequences, to which a part cannot attend; give context=1"
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
        cut = functools.partial(cut_argument, rule=attention.rule, sequences=sequences, length=length, hidden=hidden)
        args = tuple(_map_named(cut, "", value) for value in args)
        kwargs = {name: _map_named(cut, name, value) for name, value in kwargs.items()}
        with (
            sequence_part_stream(sequences.group, is_needed=layer.training and torch.is_grad_enabled()),
            _torch.attention.slow_attention(),
            _torch.autograd.checkpoints_replaced(attention.around),
            attention,
        ):
            return forward(hidden, *args, **kwargs)

    def _attention(self, layer: nn.Module, part: Tensor, rule: CutRule) -> SplitAttention:
        sequences = self.stack.sequences
        tables = PartOfTables(layer, sequences, self._whole_length(part))
        return SplitAttention(self.stack.attention, sequences, rule=rule, tables=tables)

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

    # Looking at layers ------------------------------------------------------------------------------------------

    @_torch.modes.not_compiled
    def _look(
        self, layer: nn.Module, forward: Callable[..., Any], hidden: Tensor, args: tuple[Any, ...], kwargs: Any
    ) -> Verified:
        """What has to be true before the layer runs."""
        stack = self.stack
        if layer.training and self.path not in stack.trained:
            stack.trained.add(self.path)
            check(batch_statistics_violations(self.path, layer))
        key = self._key(layer, hidden, args, kwargs)
        if key not in stack.rules:
            verified = self._compare_once(layer, forward, hidden, args, kwargs)
            stack.rules[self._key(layer, hidden, args, kwargs)] = verified  # by the dimension that was found meanwhile
            stack.rule = verified.rule
            key = self._key(layer, hidden, args, kwargs)
        if not _torch.autograd.is_in_backward():  # else a layer is computed again
            self._pass(stack.sequences.lengths)
        return stack.rules[key]

    def _pass(self, lengths: Lengths) -> None:
        """Note that a sequence enters the stack, or leaves it."""
        if self.is_first:
            lengths.check_left()
            lengths.entered = self.path
        if self.is_last:
            lengths.entered = ""

    def _key(self, layer: nn.Module, hidden: Tensor, args: tuple[Any, ...], kwargs: Any) -> tuple[Any, ...]:
        length = hidden.shape[self.stack.sequences.dim] if self.is_first else self._whole_length(hidden)
        return self.path, relations((args, kwargs, list(layer.buffers())), length)

    def _compare_once(
        self, layer: nn.Module, forward: Callable[..., Any], hidden: Tensor, args: tuple[Any, ...], kwargs: Any
    ) -> Verified:
        """Compare the layer on parts of the sequence with itself on the whole, without dropout.

        Raises:
            ConfigurationError: If they differ in every rule, with where the difference of the usual one begins.
        """
        lengths = self.stack.sequences.lengths
        before, dims = dict(lengths.whole), [lengths.dim]
        with torch.no_grad(), _torch.modes.without_dispatch_modes():
            if self.is_first:
                before, dims = {}, sequence_dims(layer)
            else:
                whole_of = functools.partial(self._whole_of, like=hidden, length=self._whole_length(hidden))
                args, kwargs = tree_map(whole_of, (args, kwargs))
                hidden = self.stack.sequences.join(hidden.detach(), lengths.dim)
        try:
            for doubles in (True, False):
                probed = functools.partial(probing, layer, ((hidden, *args), kwargs), doubles=doubles)
                whole, failure = self._on_whole(forward, probed)
                if self.stack.sequences.has_any(failure is not None, hidden.device):
                    if doubles:  # not everything computes in fp64
                        failure = failure and failure.with_traceback(None)  # whose frames hold the copies
                        continue
                    raise failure or ConfigurationError([f"{self.path}: {ELSEWHERE}"])
                return self._verified(
                    functools.partial(self._differences, layer, forward, probed, whole), dims, hidden.device
                )
        finally:
            lengths.whole = before
        raise AssertionError("the layer has run neither rule, and no error says so")

    def _on_whole(self, forward: Callable[..., Any], probed: Callable[[], Any]) -> tuple[Any, Exception | None]:
        try:
            with torch.no_grad(), _torch.attention.slow_attention(), probed() as (args, kwargs):
                return forward(*args, **kwargs), None
        except Exception as failure:
            return None, failure

    def _verified(
        self, differences: Callable[[CutRule], tuple[list[str], int]], dims: list[int], device: torch.device
    ) -> Verified:
        """The first rule in which nothing differs."""
        violations: dict[CutRule, list[str]] = {}
        for rule, dim in itertools.product(candidate_rules(self.stack.rule), dims):
            self.stack.sequences.lengths.dim = dim
            found, counted = differences(rule)
            if not self.stack.sequences.has_any(bool(found), device):  # all ranks take the same rule
                return Verified(rule, counted)
            violations.setdefault(rule, found)
        raise ConfigurationError(violations[USUAL] or [f"{self.path}: {ELSEWHERE}"])

    def _whole_of(self, value: Any, *, like: Tensor, length: int) -> Any:
        """What is a part as hidden states `like` are, whole: those that an earlier layer returned."""
        dim = self.stack.sequences.dim
        is_like = isinstance(value, Tensor) and value.shape == like.shape and value.dtype == like.dtype
        return self.stack.sequences.join(value.detach(), dim) if is_like and like.shape[dim] != length else value

    def _differences(
        self, layer: nn.Module, forward: Callable[..., Any], probed: Callable[[], Any], whole: Any, rule: CutRule
    ) -> tuple[list[str], int]:
        """Why the layer cannot work on parts by this `rule`; and how often it counted positions.

        It begins as it is: what it has kept of another run would not be there in a step. And it is run once more where
        it counts positions: those that it has kept may be another part's in the next step.
        """
        with torch.no_grad(), _torch.attention.slow_attention(), probed() as (args, kwargs):
            found, counted = self._difference(layer, forward, args, kwargs, whole, rule)
            if not found and rule.counts:
                found, again = self._difference(layer, forward, args, kwargs, whole, rule)
                found = found or ([] if again == counted else [counted_otherwise(self.path, layer)])
        return found, counted

    def _difference(
        self,
        layer: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Any,
        whole: Any,
        rule: CutRule,
    ) -> tuple[list[str], int]:
        sequences = self.stack.sequences
        part = sequences.cut(args[0], sequences.dim)
        attention = self._attention(layer, part, rule)
        try:
            ours = self._joined(self._on_part(layer, forward, part, args[1:], kwargs, attention))
        except ConfigurationError as error:
            return list(error.violations), 0
        except (RuntimeError, AssertionError, IndexError, KeyError, ValueError, TypeError) as error:
            return [failed(self.path, layer, error, has_attention=bool(attention.calls))], 0
        if not attention.calls:
            return [bypassed(self.path, layer)], 0
        found = difference(self.path, layer, first_of(ours), first_of(whole), sequences.dim)
        return [found] if found else further_violations(self.path, layer, ours, whole), attention.counted


def _map_named(function: Callable[[str, Any], Any], name: str, value: Any) -> Any:
    return tree_map(functools.partial(function, name), value)

"""Layers that work on a part of each sequence.

Nothing is taken on trust: when a layer runs for the first time, its result on parts is compared with that on the whole.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_leaves, tree_map

from lightning_parallel import _torch
from lightning_parallel.errors import ConfigurationError, check
from lightning_parallel.module.collected import Collected, collected_from_now
from lightning_parallel.module.hidden_states import Lengths, sequence_part_stream, take_hidden, with_hidden_first
from lightning_parallel.module.kv_cache import is_cache, without_fresh_cache
from lightning_parallel.module.layer_check import LayerCheck
from lightning_parallel.module.layer_kinds import are_alike_layers_trusted, kind_of
from lightning_parallel.module.layer_search import joined_behind_each
from lightning_parallel.techniques.context.attention import AttentionWatch, SplitAttention
from lightning_parallel.techniques.context.collected import join_collected, join_hidden
from lightning_parallel.techniques.context.comparison import (
    attention_violations,
    batch_statistics_violations,
    hidden_violations,
    refusing_changes,
    sequence_dims,
    wording_for,
)
from lightning_parallel.techniques.context.cut_rules import (
    USUAL,
    CutRule,
    PartOfTables,
    candidate_rules,
    cut_argument,
    relations,
    whole_of,
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
        others = [joined_behind_each([path for path, _ in layers]), "context=1"]
        stack.sequences.lengths.remedy = ", or ".join(filter(None, others))
        stack.sequences.lengths.layers = [layer for _, layer in layers]
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
    """A rule that was seen to be right, how often the layer counted positions meanwhile, and if it shared attention."""

    rule: CutRule
    counted: int
    shares: bool


@dataclass
class _SplitStack:
    """State that the layers of one stack share.

    Args:
        attention: How ranks share attention.
        sequences: What is cut now.
        rules: How the layers run that were compared with themselves, by path and by what compares with the length.
        alike: The path of a layer that was compared, by its kind and by what compares with the length.
        taken_over: The keys of rules that are those of another layer of the kind.
        rule: The latest of these.
        trained: The paths of the layers that were looked at in training.
        attending: The path of each layer that was run on whole sequences, and the kind of attention that it computed.
    """

    attention: str
    sequences: Sequences
    rules: dict[tuple[Any, ...], Verified] = field(default_factory=dict)
    alike: dict[tuple[Any, ...], str] = field(default_factory=dict)
    taken_over: set[tuple[Any, ...]] = field(default_factory=set)
    rule: CutRule = USUAL
    trained: set[str] = field(default_factory=set)
    attending: dict[str, str] = field(default_factory=dict)

    def knows(self, key: tuple[Any, ...], kind: tuple[Any, ...]) -> bool:
        """Whether there is a rule for a layer: its own, or that of another one of its kind."""
        trusted = are_alike_layers_trusted()
        if key in self.rules and (trusted is not False or key not in self.taken_over):
            return True
        if not trusted or (path := self.alike.get((kind, *key[1:]))) is None:
            return False
        self.rules[key], self.attending[key[0]] = self.rules[path, *key[1:]], self.attending[path]
        self.taken_over.add(key)
        return True


@dataclass(frozen=True)
class _Part:
    """One layer of a stack, run on a part of each sequence."""

    path: str
    stack: _SplitStack
    is_first: bool
    is_last: bool

    def run(self, layer: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The layer's result, of the arguments that the user's code gives it."""
        sequences = self.stack.sequences
        forward = with_hidden_first(forward, args, kwargs)
        hidden, args, kwargs = take_hidden(args, kwargs)
        check(hidden_violations(self.path, layer, hidden))
        args, kwargs = self._without_caches(layer, args, kwargs)
        verified, collected = self._look(layer, forward, hidden, args, kwargs)
        if self.is_first:
            hidden = sequences.cut(hidden, sequences.dim)
        attention = self._attention(layer, hidden, verified.rule)
        output = self._on_part(layer, forward, hidden, args, kwargs, attention)
        join_collected(collected, sequences, part=hidden, path=self.path)
        check(attention_violations(self.path, layer, attention, shares=verified.shares, counted=verified.counted))
        return self._joined(output) if self.is_last else output

    def _without_caches(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # A cache would hold parts of sequences; Hugging Face's layers fill one in training, too, and nobody reads it.
        args = tuple(without_fresh_cache(layer, args))
        kwargs = dict(zip(kwargs, without_fresh_cache(layer, kwargs.values()), strict=True))
        if any(is_cache(value) for value in (*args, *kwargs.values())):
            raise ConfigurationError(
                [
                    f"{self.path} ({type(layer).__name__}) is given a cache of keys and values that holds "
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
        sequences, length = self.stack.sequences, self._whole_length(hidden)
        cut = functools.partial(cut_argument, rule=attention.rule, sequences=sequences, length=length, hidden=hidden)
        given, args = (args, kwargs), tuple(_map_named(cut, "", value) for value in args)
        kwargs = {name: _map_named(cut, name, value) for name, value in kwargs.items()}
        with (
            refusing_changes(self.path, layer, given, (args, kwargs)),
            sequence_part_stream(sequences.group, is_needed=layer.training and torch.is_grad_enabled()),
            _torch.attention.slow_attention(),
            _torch.autograd.checkpoints_replaced(attention.around),
            attention,
        ):
            return forward(hidden, *args, **kwargs)

    def _attention(self, layer: nn.Module, part: Tensor, rule: CutRule) -> SplitAttention:
        tables = PartOfTables(layer, self.stack.sequences, self._whole_length(part))
        return SplitAttention(self.stack.attention, self.stack.sequences, rule=rule, tables=tables)

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
    ) -> tuple[Verified, Collected | None]:
        """Check the conditions under which the layer can run on a part; begin to note what hooks in it collect."""
        stack = self.stack
        if not self.is_first:
            join_hidden(hidden, stack.sequences)
        if layer.training and self.path not in stack.trained:
            stack.trained.add(self.path)
            check(batch_statistics_violations(self.path, layer))
        key = self._key(layer, hidden, args, kwargs)
        if not stack.knows(key, kind_of(layer)):
            verified = self._compare_once(layer, forward, hidden, args, kwargs)
            stack.rule, key = verified.rule, self._key(layer, hidden, args, kwargs)  # by the dimension that was found
            stack.rules[key], stack.alike[kind_of(layer), *key[1:]] = verified, self.path
        if not _torch.autograd.is_in_backward():  # else a layer is computed again
            self._pass(stack.sequences.lengths)
        return stack.rules[key], collected_from_now()

    def _pass(self, lengths: Lengths) -> None:
        """Note that a sequence enters the stack, or leaves it."""
        if self.is_first:
            lengths.check_left()
            lengths.entered = self.path
        if self.is_last:
            lengths.entered = ""

    def _key(self, layer: nn.Module, hidden: Tensor, args: tuple[Any, ...], kwargs: Any) -> tuple[Any, ...]:
        length = hidden.shape[self.stack.sequences.dim] if self.is_first else self._whole_length(hidden)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        # An evaluation before training shows no gradients of what was computed outside of the stack.
        have_gradients = tuple(leaf.requires_grad for leaf in tensors)
        return self.path, relations((tensors, list(layer.buffers())), length), have_gradients

    def _compare_once(
        self, layer: nn.Module, forward: Callable[..., Any], hidden: Tensor, args: tuple[Any, ...], kwargs: Any
    ) -> Verified:
        """Compare the layer on parts of the sequence with itself on the whole, without dropout.

        Raises:
            ConfigurationError: If they differ in every rule, with where the difference of the usual one begins.
        """
        sequences, lengths = self.stack.sequences, self.stack.sequences.lengths
        before, dims = dict(lengths.whole), [lengths.dim]
        with torch.no_grad(), _torch.modes.without_dispatch_modes():
            if self.is_first:
                before, dims = {}, sequence_dims(layer)
            else:
                joined = functools.partial(whole_of, sequences=sequences, like=hidden)
                args, kwargs = tree_map(joined, (args, kwargs))
                hidden = self.stack.sequences.join(hidden.detach(), lengths.dim)
        try:
            return self._verified(layer, forward, ((hidden, *args), kwargs), dims)
        finally:
            lengths.whole = before

    def _verified(self, layer: nn.Module, forward: Callable[..., Any], arguments: Any, dims: Sequence[int]) -> Verified:
        """The first rule in which nothing differs."""
        sequences = self.stack.sequences
        runs: list[SplitAttention] = []  # on parts, by the rule that is tried
        check = LayerCheck(
            layer,
            arguments,
            wording=wording_for(
                self.path,
                layer,
                sequences,
                has_attention=lambda: bool(runs and runs[-1].calls),
                kind=lambda: self.stack.attending[self.path],
            ),
            has_any=functools.partial(sequences.has_any, device=arguments[0][0].device),
            reduce=sequences.averaged,
            group=sequences.group,
        )
        error = check.run_whole(lambda args, kwargs: forward(*args, **kwargs), inside=lambda: _watched(self))
        if check.whole is None:
            raise error or ConfigurationError([check.wording.elsewhere])
        shares = self.stack.attending[self.path] == "torch"
        if not shares:
            dims = dims[:1]  # any layer is right on a part of the samples, which nothing tells from a sequence here
        violations: dict[CutRule, list[str]] = {}
        of_gradients: list[str] = []
        for rule, dim in itertools.product(candidate_rules(self.stack.rule), dims):
            sequences.lengths.dim = dim
            runs.clear()
            # Where the layer counts positions: those that it has kept may be another part's in the next step.
            run = functools.partial(self._run_split, layer, forward, rule, runs)
            found = check.run_split(run, times=2 if rule.counts or rule.pairs else 1)
            if not found:
                return Verified(rule, runs[-1].counted, shares)
            violations.setdefault(rule, found)
            of_gradients = of_gradients or (found if check.has_equal_results else [])
        raise ConfigurationError(of_gradients or violations[USUAL])

    def _run_split(
        self,
        layer: nn.Module,
        forward: Callable[..., Any],
        rule: CutRule,
        runs: list[SplitAttention],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """The layer's result by `rule`, from whole hidden states to whole ones."""
        part = self.stack.sequences.cut(args[0], self.stack.sequences.dim)
        attention = self._attention(layer, part, rule)
        runs.append(attention)
        collected = collected_from_now()
        output = self._joined(self._on_part(layer, forward, part, args[1:], kwargs, attention))
        join_collected(collected, self.stack.sequences, part=part, path=self.path)
        shares = self.stack.attending[self.path] == "torch"
        check(attention_violations(self.path, layer, attention, shares=shares, counted=runs[0].counted))
        return output


@contextlib.contextmanager
def _watched(part: _Part) -> Iterator[None]:
    """Inside this context, a layer runs on whole sequences; notes whether it computes attention."""
    with _torch.attention.slow_attention(), AttentionWatch() as watch:
        yield
    part.stack.attending[part.path] = watch.kind


def _map_named(function: Callable[[str, Any], Any], name: str, value: Any) -> Any:
    return tree_map(functools.partial(function, name), value)

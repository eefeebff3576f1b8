"""Data flow between the linear maps of one layer, found by running it on tensors without memory."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_parallel.module.dry_run import side_effects_undone
from lightning_parallel.module.recorded_calls import LayerCall
from lightning_parallel.ranks.divisibility import degrees_for_heads, listed
from lightning_parallel.ranks.random_streams import unchanged_generators
from lightning_parallel.techniques.tensor.argument_guesses import guess_arguments
from lightning_parallel.techniques.tensor.linear_maps import is_transposed, linear_maps, unlike_linear

_attention = F.scaled_dot_product_attention
NAME_MAPS = "name its maps with tensor_plan={'path.in.layer': 'colwise' or 'rowwise'}"
_GUESSED = "on hidden states, and what the names of its arguments suggest"
_GROUPED = ("grouped_mm", "_grouped_mm")
"""Functions that multiply each expert's tokens by its weights."""


def heads_violation(size: int, heads: int, kv_heads: int) -> str:
    """Reason why `size` ranks cannot share these heads; empty if they can.

    Args:
        size: Ranks that share a matrix product.
        heads: Heads of queries.
        kv_heads: Heads of keys and values.
    """
    legal = degrees_for_heads(heads, kv_heads)
    if size in legal:
        return ""
    kv = f" and {kv_heads} heads of keys and values" if kv_heads != heads else ""
    return f"tensor={size} cannot share {heads} heads{kv}; possible: {listed(legal)}"


@dataclass(frozen=True)
class _Attention:
    """One call of scaled-dot-product attention: its heads, and the maps from which keys and values come."""

    heads: int
    kv_heads: int
    kv_sources: frozenset[str]
    head_dim: int


@dataclass
class LayerTrace:
    """Result of tracing one run of a layer.

    Args:
        sources: Path of a map -> the maps from whose outputs alone its input is made; empty where hidden states reach
            it without passing through a map, too.
        attentions: The calls of attention.
        split_whole: Paths of `nn.MultiheadAttention`, each of which is split as a unit.
        outputs: Path of a map -> its number of outputs.
        num_heads: Path of an `nn.MultiheadAttention` -> its number of heads.
        failures: Reasons why the layer could not be run; empty if it could.
        called: Paths of the maps that the layer has called.
    """

    sources: dict[str, frozenset[str]] = field(default_factory=dict)
    attentions: list[_Attention] = field(default_factory=list)
    split_whole: list[str] = field(default_factory=list)
    outputs: dict[str, int] = field(default_factory=dict)
    num_heads: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    called: set[str] = field(default_factory=set)

    def roles(self, size: int) -> dict[str, str]:
        """Assign roles to maps that `size` ranks can share: the last of a branch by rows, those before by columns."""
        rowwise = {
            path for path, sources in self.sources.items() if sources and not any(self.sources[s] for s in sources)
        }
        whole = {path for attention in self.attentions for path in self._too_few(attention, size)}
        colwise = {source for path in rowwise for source in self.sources[path]} - whole
        rowwise = {path for path in rowwise if self.sources[path] & colwise}
        roles = dict.fromkeys(self.split_whole, "heads")
        roles |= dict.fromkeys(colwise, "colwise") | dict.fromkeys(rowwise, "rowwise")
        return {path: roles[path] for path in self.sources if path in roles}

    def left_whole(self, size: int) -> dict[str, str]:
        """Map the paths of maps that `size` ranks do not share to the reason."""
        roles, too_few = self.roles(size), {path for each in self.attentions for path in self._too_few(each, size)}
        return {path: self._reason(path, too_few) for path in self.sources if path not in roles}

    def _reason(self, path: str, too_few: set[str]) -> str:
        sources = self.sources[path]
        later = sorted(source for source in sources if self.sources[source])
        if path not in self.called:
            return "is not called"
        if path in too_few:
            return "has fewer heads than there are ranks"
        if not sources:
            return "reads hidden states, and no map reads what it makes of them alone"
        if later:
            return f"reads what {', '.join(later[:2])} makes of the results of other maps"
        return f"reads what {', '.join(sorted(sources)[:2])} makes, which stays whole"

    def head_violations(self, size: int) -> list[str]:
        """Reasons why `size` ranks cannot share the heads; empty if they can."""
        counts = [*(a.heads for a in self.attentions), *(self.num_heads[path] for path in self.split_whole)]
        return [found for heads in dict.fromkeys(counts) if (found := heads_violation(size, heads, heads))]

    def _too_few(self, attention: _Attention, size: int) -> Iterator[str]:
        """Maps of keys and values whose heads the ranks cannot divide; these maps stay whole."""
        for path in attention.kv_sources:
            if self.outputs[path] <= attention.heads * attention.head_dim and (
                self.outputs[path] // attention.head_dim % size
            ):
                yield path


def trace_layer(layer: nn.Module, call: LayerCall | None = None) -> LayerTrace:
    """Run `layer` once, and trace the data flow from map to map.

    It runs on the meta device, or, where its code reads values, on a real one with parameters that take no memory. The
    layer is not changed, and its parameters are not copied.

    Args:
        layer: The layer.
        call: The way a step has called it; without one, hidden states are given, and other arguments are guessed.
    """
    reasons = []
    for device, limit in _devices(call):
        placeholder = _without_memory(layer, device)
        for args, kwargs in _each_try(placeholder, call, device, limit=limit):
            trace = LayerTrace()
            try:
                with device, warnings.catch_warnings(action="ignore"), side_effects_undone(placeholder):
                    _run(placeholder, args, kwargs, trace, device)
            except Exception as error:
                reasons.append((f"{type(error).__name__}: {error}".splitlines() or [""])[0])
            else:
                return trace
    first = reasons[-1 if call else 0] if reasons else _no_maps(layer)
    tried = f"on what the first step gives it, ({call})" if call else _GUESSED
    return LayerTrace(
        failures=[f"could not be run {tried}, to see what flows through it ({first}); {NAME_MAPS}"],
    )


def _no_maps(layer: nn.Module) -> str:
    unlike = "".join(f"; {path} {reason}" for path, reason in islice(unlike_linear(layer).items(), 4))
    return f"it has no linear maps of torch's own kinds{unlike}"


def _devices(call: LayerCall | None) -> list[tuple[torch.device, int]]:
    """Where to run a layer, and how often: fewer times on a real device, where each run really computes."""
    return [(torch.device("meta"), 120), (torch.device("cpu") if call is None else call.device, 24)]


def _each_try(
    layer: nn.Module, call: LayerCall | None, device: torch.device, *, limit: int
) -> Iterator[tuple[list[Any], dict[str, Any]]]:
    if call is not None:
        yield call.on(device, {parameter.dtype for parameter in layer.parameters()})
        return
    for width in _widths(layer):
        yield from guess_arguments(layer, width, _vectors(layer), device, limit=limit)


def _widths(layer: nn.Module) -> list[int]:
    """Guess the width of hidden states, the likeliest first."""
    found: Counter[int] = Counter()
    for _, child in linear_maps(layer):
        weight: Any = getattr(child, "weight", None)
        found[child.embed_dim if weight is None else int(weight.shape[0 if is_transposed(child) else 1])] += 1  # type: ignore[index]
    if found:
        vectors = (p.shape[0] for p in layer.parameters() if p.ndim == 1)
        found.update(size for size in vectors if size not in found)
    return [width for width, _ in found.most_common(3)]


def _vectors(layer: nn.Module) -> list[int]:
    """Guess the widths of arguments beside hidden states."""
    sizes = Counter(int(parameter.shape[-1]) for parameter in layer.parameters() if parameter.ndim == 2)
    return [size for size, _ in sizes.most_common(4)]


def _run(layer: nn.Module, args: list[Any], kwargs: dict[str, Any], trace: LayerTrace, device: torch.device) -> None:
    handles = []
    for path, child in linear_maps(layer):
        trace.sources[path] = frozenset()
        if isinstance(child, nn.MultiheadAttention):
            trace.split_whole.append(path)
            trace.num_heads[path] = child.num_heads
            continue
        trace.outputs[path] = int(child.weight.shape[1 if is_transposed(child) else 0])  # type: ignore[index, union-attr]

        def before(module: nn.Module, args: Any, kwargs: Any, path: str = path) -> None:
            inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            trace.sources[path] = _sources(inputs)
            trace.called.add(path)

        def after(module: nn.Module, args: Any, output: Any, path: str = path) -> Any:
            return tree_map_only(Tensor, lambda tensor: _Mark.apply(tensor, path), output)

        handles.append(child.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(child.register_forward_hook(after))
    drawn_on = torch.device("cpu") if device.type == "meta" else device
    try:
        with torch.enable_grad(), unchanged_generators(drawn_on), _AttentionNoted(trace):
            layer(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()


class _Mark(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, path: str) -> Tensor:
        ctx.path = path
        return output.clone()  # a view might not be written into

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise AssertionError("a trace has no backward")


class _AttentionNoted(TorchFunctionMode):
    def __init__(self, trace: LayerTrace) -> None:
        super().__init__()
        self._trace = trace

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _attention:
            named = dict(zip(("query", "key", "value"), args, strict=False)) | (kwargs or {})
            query, key = named["query"], named["key"]
            if query.ndim == 4:
                sources = _sources([key, named["value"]])
                self._trace.attentions.append(
                    _Attention(query.shape[1], key.shape[1], sources - _sources([query]), query.shape[-1])
                )
        if getattr(func, "__name__", "") in _GROUPED and args[0].ndim == 2 and args[1].ndim == 3:
            # Of the same shape and data flow; the kernels themselves refuse tensors without memory.
            return args[0] @ args[1][0]
        return func(*args, **(kwargs or {}))


def _sources(tensors: list[Tensor]) -> frozenset[str]:
    """Find the maps from whose outputs alone `tensors` are made; empty if a hidden state reaches them another way."""
    found: set[str] = set()
    seen: set[Any] = set()
    waiting = [tensor.grad_fn for tensor in tensors]
    if any(tensor.grad_fn is None and tensor.requires_grad for tensor in tensors):
        return frozenset()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "path"):
            found.add(node.path)
        elif hasattr(node, "variable"):
            if not isinstance(node.variable, nn.Parameter):
                return frozenset()
        else:
            waiting += [parent for parent, _ in node.next_functions]
    return frozenset(found)


def _without_memory(layer: nn.Module, device: torch.device) -> nn.Module:
    """Copy `layer` to `device` with tensors that take no memory and parameters that require gradients.

    Tensors are expanded from a single element. Parameters require gradients so that autograd records the data flow.
    """
    memo: dict[int, Any] = {}
    # Also what hooks compute from parameters before each call, as torch's pruning and its old weight_norm do: such
    # tensors cannot be copied.
    attributes = [value for child in layer.modules() for value in vars(child).values() if isinstance(value, Tensor)]
    for tensor in (*layer.parameters(), *layer.buffers(), *(each for each in attributes if not each.is_leaf)):
        placeholder = torch.zeros((), dtype=tensor.dtype, device=device).expand(tensor.shape)
        memo[id(tensor)] = (
            nn.Parameter(placeholder, placeholder.is_floating_point())
            if isinstance(tensor, nn.Parameter)
            else placeholder
        )
    return copy.deepcopy(layer, memo)

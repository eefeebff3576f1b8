"""Tensor-parallel plan: the linear maps of the layers that are split over ranks, and the role of each.

Source: Shoeybi et al. 2019, "Megatron-LM". Maps that read the same hidden states are split by columns (each rank has
some of the outputs), the map that closes a branch by rows. The plan comes from the user's dict, else from the model's
own `_tp_plan` (Hugging Face), else from tracing the data flow between the maps of one layer, on the meta device.
"""

from __future__ import annotations

import difflib
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from lightning_parallel.module.layer_stacks import ModuleStructure, first_names
from lightning_parallel.module.recorded_calls import LayerCall
from lightning_parallel.ranks.divisibility import divisors, listed
from lightning_parallel.techniques.tensor.argument_guesses import HEAD_COUNTS
from lightning_parallel.techniques.tensor.linear_maps import is_transposed, linear_maps, shape_of, unlike_linear
from lightning_parallel.techniques.tensor.splits import MapSplit
from lightning_parallel.techniques.tensor.trace import heads_violation, trace_layer

ROLES = ("colwise", "rowwise", "replicate")
VOCABULARY = "vocab"
_TABLES = (nn.Embedding.forward, nn.Linear.forward)
"""Forwards of tables of tokens. A subclass that scales embeddings or caps logits has another, and is not split."""
_HUGGING_FACE = {"colwise": "colwise", "rowwise": "rowwise"}
_MOST_SHOWN = 4
_MOST = 64  # ranks: messages list divisors up to it
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head")


@dataclass(frozen=True)
class UnseenLayers:
    """Layers of one kind that did not run on guessed arguments.

    Args:
        layers: Their paths.
        reason: The error, in a sentence for users.
    """

    layers: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class TensorPlan:
    """Roles of linear maps under tensor parallel, by path in the module.

    Args:
        roles: Path of a linear map -> ``"colwise"`` or ``"rowwise"``; of `nn.MultiheadAttention` -> ``"heads"``. Maps
            that are not named are whole on every rank.
        source: The origin of the plan, in words.
        violations: Reasons why it cannot be carried out, each with the possible values; empty if it can.
        splits: Every linear map with its shape and that of a rank's part, also those that stay whole.
        unseen: Layers whose arguments could not be guessed: nothing is split until a step has shown these.
        left_whole: Maps that flow alone does not let split, with shape and reason, of one layer of each kind.
    """

    roles: dict[str, str]
    source: str
    violations: list[str] = field(default_factory=list)
    splits: tuple[MapSplit, ...] = ()
    unseen: tuple[UnseenLayers, ...] = ()
    left_whole: tuple[str, ...] = ()

    @property
    def tables(self) -> list[str]:
        """Paths of embeddings and heads that are split by tokens."""
        return [path for path, role in self.roles.items() if role == VOCABULARY]

    def below(self, path: str) -> dict[str, str]:
        """Roles of the maps in the layer at `path`, by path in that layer."""
        return {name.removeprefix(f"{path}."): role for name, role in self.roles.items() if name.startswith(f"{path}.")}


def plan_tensor(
    module: nn.Module,
    structure: ModuleStructure,
    given: Mapping[str, str] | None,
    *,
    degree: int | str,
    calls: Mapping[str, LayerCall] | None = None,
) -> TensorPlan:
    """Decide how the layers of `module` are split over `degree` ranks; changes nothing.

    Args:
        module: The whole module, on any device.
        structure: Its layer stacks.
        given: The user's own plan: path, in which ``*`` is one name, or the end of a path -> role.
        degree: Ranks that share a matrix product; a word such as ``"auto"`` where the number is not known yet.
        calls: Path of a layer -> how a step has called it; ``None`` before the first step.

    Returns:
        The plan, with violations where it cannot be carried out.

    Example:
        >>> plan_tensor(module, find_layers(module), None, degree=2).roles
    """
    size = degree if isinstance(degree, int) else 1
    maps = {f"{layer}.{path}": m for layer in structure.layers for path, m in linear_maps(module.get_submodule(layer))}
    maps = _without_outside(module, maps)
    heads = _declared_heads(module, maps, size)
    tables, violations = _vocabulary(module, structure, given or {}, size)
    if tables or violations:
        rest = {pattern: role for pattern, role in (given or {}).items() if role != VOCABULARY}
        plan = plan_tensor(module, structure, rest or None, degree=degree, calls=calls)
        return replace(plan, roles={**plan.roles, **tables}, violations=[*plan.violations, *violations])
    if given is not None:
        roles, violations = _from_dict(given, maps)
        return _checked(TensorPlan(roles, "tensor_plan", violations), maps, heads, size)
    if roles := _from_model(module, maps):
        return _checked(TensorPlan(roles, "the model's own _tp_plan"), maps, heads, size)
    return _checked(_from_flow(module, structure, size, calls), maps, heads, size)


def _from_flow(
    module: nn.Module, structure: ModuleStructure, size: int, calls: Mapping[str, LayerCall] | None
) -> TensorPlan:
    """Infer roles from what flows through one layer of each kind."""
    kinds: dict[Any, list[str]] = defaultdict(list)
    for path in dict.fromkeys(structure.layers):
        layer = module.get_submodule(path)
        kinds[type(layer), tuple((name, *shape_of(m)) for name, m in linear_maps(layer))].append(path)
    roles: dict[str, str] = {}
    violations: list[str] = []
    unseen: list[UnseenLayers] = []
    left_whole: list[str] = []
    has_maps = any(maps for _, maps in kinds)
    for (cls, maps), paths in kinds.items():
        if has_maps and not maps:  # such as the norms between layers: whole, as all that has nothing to split
            left_whole += _described(paths[0], cls.__name__, module, {})
            continue
        # Layers of a kind have the same maps, but may be given other sizes: a call belongs to its own layer.
        path = next((path for path in paths if path in (calls or {})), paths[0])
        call = (calls or {}).get(path)
        trace = trace_layer(module.get_submodule(path), call)
        reasons = [f"{path} ({cls.__name__}) {reason}" for reason in trace.failures]
        if maps and call is None:
            unseen += [UnseenLayers(tuple(paths), reason) for reason in reasons]
        else:
            violations += reasons
        violations += [f"{path}: {reason}" for reason in trace.head_violations(size)]
        left_whole += _described(path, cls.__name__, module, trace.left_whole(size))
        roles |= {f"{each}.{name}": role for each in paths for name, role in trace.roles(size).items()}
    # A layer that the step has not called stays whole.
    waiting = tuple(unseen) if calls is None else ()
    return TensorPlan(roles, _FLOW, violations, unseen=waiting, left_whole=tuple(left_whole))


_FLOW = "what flows from map to map in a layer"


def _described(path: str, cls: str, module: nn.Module, left_whole: dict[str, str]) -> Iterator[str]:
    """The maps of one layer that stay whole: class, path, shape and reason of each."""
    layer = module.get_submodule(path)
    for name, reason in (left_whole | unlike_linear(layer)).items():
        yield f"{path}.{name} {list(shape_of(layer.get_submodule(name)))} of {cls} {reason}"


def _from_dict(given: Mapping[str, str], maps: Mapping[str, nn.Module]) -> tuple[dict[str, str], list[str]]:
    roles: dict[str, str] = {}
    violations = []
    for pattern, role in given.items():
        named = [path for path in maps if _matches(pattern, path)]
        if not named:
            ends = sorted({path.rpartition(".")[2] for path in maps})
            near = difflib.get_close_matches(pattern, [*ends, *maps], n=3) or ends[:8]
            violations.append(
                f"tensor_plan: {pattern!r} names no linear map of the layers; there are {', '.join(near) or 'none'}"
            )
        if role not in ROLES:
            violations.append(
                f"tensor_plan: {role!r} for {pattern!r} is unknown; possible: {', '.join(ROLES)}, {VOCABULARY}"
            )
        is_split = role != "replicate"
        roles |= {p: "heads" if is_split and isinstance(maps[p], nn.MultiheadAttention) else role for p in named}
    return {path: role for path, role in roles.items() if role != "replicate"}, violations


def _vocabulary(
    module: nn.Module, structure: ModuleStructure, given: Mapping[str, str], size: int
) -> tuple[dict[str, str], list[str]]:
    """Find the embeddings and heads that `given` splits by tokens, with those that share a weight with them."""
    outside = {
        path: child
        for path, child in module.named_modules()
        if getattr(type(child), "forward", None) in _TABLES
        and not any(path.startswith(f"{x}.") for x in structure.layers)
    }
    roles: dict[str, str] = {}
    violations = []
    for pattern in (pattern for pattern, role in given.items() if role == VOCABULARY):
        named = [path for path in outside if _matches(pattern, path)]
        if not named:
            violations.append(
                f"tensor_plan: {pattern!r} names no embedding or head outside of the layers; there are "
                f"{', '.join(outside) or 'none'}"
            )
        weights = {id(outside[path].weight) for path in named}
        roles |= {path: VOCABULARY for path, child in outside.items() if id(child.weight) in weights}
    for path in roles:
        child: Any = outside[path]
        if child.weight.shape[0] % size:
            violations.append(
                f"tensor={size} does not divide the {child.weight.shape[0]} tokens of {path}; possible: "
                f"{listed(divisors(child.weight.shape[0], at_most=_MOST))}"
            )
        if any(getattr(child, name, None) for name in ("max_norm", "sparse", "scale_grad_by_freq")):
            violations.append(
                f"{path}: an embedding with max_norm, scale_grad_by_freq or sparse gradients is not split; leave it out"
            )
        others = [n for n, p in module.named_parameters(remove_duplicate=False) if p is child.weight]
        if strangers := [name for name in others if name.removesuffix(".weight") not in roles]:
            violations.append(
                f"{path} is not split: {strangers[0]} is the same parameter, and no embedding or head outside of the "
                f"layers; leave {path} out of tensor_plan"
            )
    return roles, violations


def _from_model(module: nn.Module, maps: Mapping[str, nn.Module]) -> dict[str, str]:
    roles: dict[str, str] = {}
    for prefix, submodule in module.named_modules():
        for pattern, style in (getattr(submodule, "_tp_plan", None) or {}).items():
            whole = f"{prefix}.{pattern}" if prefix else pattern
            if style in _HUGGING_FACE:
                roles |= {path: _HUGGING_FACE[style] for path in maps if _pattern(whole).fullmatch(path)}
    return {path: roles[path] for path in maps if path in roles}


def _matches(pattern: str, path: str) -> bool:
    return bool(re.fullmatch(rf"(.*\.)?{_pattern(pattern).pattern}", path))


def _pattern(pattern: str) -> re.Pattern[str]:
    return re.compile(re.escape(str(pattern)).replace(r"\*", r"[^.]+"))


# Divisibility -------------------------------------------------------------------------------------------------------


def _checked(plan: TensorPlan, maps: Mapping[str, nn.Module], heads: _Heads, size: int) -> TensorPlan:
    """Remove maps from the plan that have to stay whole, and add violations for sizes that do not divide."""
    told = " ".join(plan.violations)  # the trace of a layer may have reported the same heads already
    declared = [violation for violation in heads.violations if violation.partition(": ")[2] not in told]
    violations = list(dict.fromkeys([*plan.violations, *declared]))
    shared = _shared_otherwise(maps, plan.roles)
    roles = {path: role for path, role in plan.roles.items() if path not in heads.whole and path not in shared}
    odd = [path for path, role in roles.items() if role != "heads" and _split_size(maps[path], role) % size]
    for path in odd[:4]:
        length = _split_size(maps[path], roles[path])
        violations.append(
            f"tensor={size} does not divide the {length} {'outputs' if roles[path] == 'colwise' else 'inputs'} of "
            f"{path}; possible: {listed(divisors(length, at_most=_MOST))}"
        )
    if not roles and not violations and not plan.unseen:
        shown = f" ({'; '.join(plan.left_whole[:_MOST_SHOWN])})" if plan.left_whole else ""
        violations.append(
            f"tensor={size}: no branch of linear maps was found in the layers that could be split{shown}; name them "
            "with tensor_plan={'path.in.layer': 'colwise' or 'rowwise'}, or give tensor=1"
        )
    return replace(plan, roles=roles, violations=violations)


def split_statistics_violations(module: nn.Module, plan: TensorPlan, layers: Sequence[str]) -> list[str]:
    """Reasons why split layers cannot keep running statistics: each rank would see its own features only.

    Args:
        module: The whole module.
        plan: The tensor-parallel plan.
        layers: Paths of the layers.
    """
    found = [
        f"{layer}.{path}"
        for layer in layers
        if plan.below(layer)
        for path, child in module.get_submodule(layer).named_modules()
        if getattr(child, "track_running_stats", False)
    ]
    return [
        f"{path} keeps running statistics, and each rank would count its own features only; give tensor=1, or a norm "
        "without statistics"
        for path in found[:1]
    ]


def _without_outside(module: nn.Module, maps: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Leave out maps that share a parameter with anything outside of the layers' maps, such as an embedding."""
    inside = {f"{path}.{name}" for path, linear in maps.items() for name, _ in linear.named_parameters()}
    first = first_names(module)
    outside = {p for name, p in module.named_parameters(remove_duplicate=False) if first[name] not in inside}
    return {path: linear for path, linear in maps.items() if outside.isdisjoint(linear.parameters())}


def _shared_otherwise(maps: Mapping[str, nn.Module], roles: Mapping[str, str]) -> set[str]:
    """Maps that share a parameter with a map of another role, or of none: these stay whole."""
    by_parameter: dict[nn.Parameter, set[str]] = defaultdict(set)
    for path, linear in maps.items():
        for parameter in linear.parameters():
            by_parameter[parameter].add(path)
    unequal = [paths for paths in by_parameter.values() if len({roles.get(path) for path in paths}) > 1]
    return {path for paths in unequal for path in paths}


def _split_size(linear: nn.Module, role: str) -> int:
    weight: Any = linear.weight
    return int(weight.shape[(role == "colwise") == is_transposed(linear)])


@dataclass(frozen=True)
class _Heads:
    """Heads that modules declare: maps that stay whole because they have too few, and numbers that do not divide."""

    whole: frozenset[str]
    violations: list[str]


def _declared_heads(module: nn.Module, maps: Mapping[str, nn.Module], size: int) -> _Heads:
    whole, violations = set(), []
    for parent in dict.fromkeys(path.rpartition(".")[0] for path in maps):
        attention = module.get_submodule(parent)
        heads, kv_heads = _number(attention, HEAD_COUNTS), _number(attention, _KV_HEADS)
        if heads is None:
            continue
        if violation := heads_violation(size, heads, kv_heads or heads):
            violations.append(f"{parent}: {violation}")
        elif kv_heads is not None and kv_heads % size:
            width = _number(attention, ("head_dim",))
            siblings = {p: m for p, m in maps.items() if p.rpartition(".")[0] == parent}
            whole |= {
                p for p, m in siblings.items() if width and _split_size(m, "colwise") == kv_heads * width and _is_kv(p)
            }
    return _Heads(frozenset(whole), violations[:1])


def _is_kv(path: str) -> bool:
    return re.search(r"k|v", path.rpartition(".")[2].replace("_proj", "")) is not None


def _number(module: nn.Module, names: Sequence[str]) -> int | None:
    for holder in (module, getattr(module, "config", None)):
        for name in names:
            if isinstance(value := getattr(holder, name, None), int) and not isinstance(value, bool):
                return value
    return None

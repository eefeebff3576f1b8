"""Find the stack(s) of repeated layers in an unchanged module, and describe them once.

Nearly every model is a prologue (embeddings), a stack of repeated layers, and an epilogue (norm, head). Every
technique is a transformation of that description: sharding takes a layer as its unit, a pipeline cuts the stack.
"""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from torch import nn

from lightning_parallel.errors import check
from lightning_parallel.module.layer_search import CONTAINERS, LayerRun, children_of, named_run, search, split_slice

LARGE_UNIT_NUMEL = 2**24
"""Outside a stack, a submodule of at least this many parameters is a unit of its own: 64 MiB in fp32, from where on the
time of a collective depends on its bytes and no longer on its latency."""


@dataclass(frozen=True)
class Stack:
    """Repeated layers in a container: all its children, a slice of them, or the modules in a list of lists.

    Args:
        path: The container's path in the module, such as ``"model.layers"``, or with a slice, such as ``"net.1:-1"``:
            what `find_layers` takes to name this stack.
        layers: The layers' paths, in order; that of a layer that stands at several places comes several times.
        layer_type: The layers' class name, or several joined by ``|``.
        numel: The number of elements of all their parameters, each counted once.
        is_chain: Whether each layer takes what the one before it has returned, as far as the structure shows.
    """

    path: str
    layers: tuple[str, ...]
    layer_type: str
    numel: int
    is_chain: bool = True

    @property
    def chains(self) -> tuple[tuple[str, ...], ...]:
        """Layers between which nothing but hidden states passes; where that is not known, each layer is one."""
        return (self.layers,) if self.is_chain else tuple((layer,) for layer in dict.fromkeys(self.layers))


@dataclass(frozen=True)
class ModuleStructure:
    """Result of `find_layers`; has paths, not modules.

    Args:
        stacks: The stacks in order of registration; empty if the module has none.
        prologue: Modules with parameters before the first stack, in order of registration.
        between: The same between stacks.
        epilogue: The same after the last stack.
        large: Submodules outside the stacks that are large enough to be a unit of their own.
        shared: Path of a layer or large submodule -> path of a parameter outside it with which it shares memory.
        numel: The number of elements of all parameters, each counted once.
    """

    stacks: tuple[Stack, ...]
    prologue: tuple[str, ...]
    between: tuple[str, ...]
    epilogue: tuple[str, ...]
    large: tuple[str, ...]
    shared: dict[str, str]
    numel: int

    @property
    def layers(self) -> tuple[str, ...]:
        """The paths of the layers of all stacks, in order."""
        return tuple(layer for stack in self.stacks for layer in stack.layers)

    @property
    def units(self) -> tuple[str, ...]:
        """Layers and large submodules that share no parameter with the rest, so that each can be sharded by itself."""
        return tuple(path for path in dict.fromkeys((*self.layers, *self.large)) if path not in self.shared)

    def explain(self) -> str:
        """Describe for users what was found."""
        lines = [f"{self.numel:,} parameters"]
        for stack in self.stacks:
            number, distinct = len(stack.layers), len(set(stack.layers))
            repeated = "" if number == distinct else f" (of {distinct} that are called again)"
            each = f"{stack.numel // distinct:,} parameters {'on average' if '|' in stack.layer_type else 'each'}"
            lines.append(f"stack {stack.path}: {number} x {stack.layer_type}{repeated}, {each}")
        if not self.stacks:
            lines.append(
                "no stack of repeated layers; name one with layers='path.to.the.list' if there is one "
                "(a ModuleList or Sequential)"
            )
        for title in ("prologue", "between", "epilogue"):
            if paths := getattr(self, title):
                lines.append(f"{title}: {', '.join(paths)}")
        lines.extend(f"large submodule: {path}" for path in self.large)
        lines.extend(f"{path} is no unit of its own: it shares {name}" for path, name in self.shared.items())
        return "\n".join(lines)


def find_layers(module: nn.Module, layers: str | Sequence[str] | None = None) -> ModuleStructure:
    """Describe the layer stacks of `module`, which is not changed.

    A stack is in the outermost container (`ModuleList`, `Sequential`, `ModuleDict`) of at least two layers, which are
    children that have children and parameters themselves: all its children, if they are of one class; a run of them, if
    they are of one class, or of several that take turns and have a base or their arguments in common; in a list of
    lists, the layers of all. Without any, it is a list of one layer.

    Args:
        module: Any module.
        layers: The path or paths of the stacks in place of a search, each of a container, or of a slice of its
            children (``"net.1:-1"``); ``[]`` for none, and for no large submodules.

    Returns:
        Paths of the stacks and of what is around them.

    Raises:
        ConfigurationError: For a path in `layers` that does not exist, is not a container of modules, or has no layer.

    Example:
        >>> print(find_layers(nn.Transformer()).explain())
    """
    check(layers_violations(module, layers))
    first_paths = dict[nn.Module, str]((child, path) for path, child in module.named_modules())
    named = [layers] if isinstance(layers, str) else list(layers or ())
    runs = search(module) if layers is None else [named_run(module, path) for path in named]
    stacks = _stacks(module, runs, first_paths)
    inside = list(dict.fromkeys(layer for stack in stacks for layer in stack.layers))
    outside = [path for path in _parametrised_leaves(module) if not _is_below(path, inside)]
    order = {path: index for index, (path, _) in enumerate(module.named_modules())}
    first = min((order[layer] for layer in inside), default=len(order))
    last = max((order[layer] for layer in inside), default=len(order))
    of_size = [] if layers == [] else _large(module, "")  # the user wants all parameters in one unit
    by_first_name = [path for path in of_size if first_paths[module.get_submodule(path)] == path]
    large = tuple(path for path in by_first_name if not _is_below(path, inside))
    return ModuleStructure(
        stacks=stacks,
        prologue=tuple(path for path in outside if order[path] < first),
        between=tuple(path for path in outside if first <= order[path] <= last),
        epilogue=tuple(path for path in outside if order[path] > last),
        large=large,
        shared=_shared_with_outside(module, [*inside, *large]),
        numel=_numel(module),
    )


def layers_violations(module: nn.Module, layers: str | Sequence[str] | None) -> list[str]:
    """Reasons why the paths in `layers` cannot be the stacks of `module`; empty if they can.

    Args:
        module: The whole module.
        layers: As `find_layers` takes them.
    """
    found = []
    modules = dict(module.named_modules(remove_duplicate=False))
    containers = [path for path, child in modules.items() if isinstance(child, CONTAINERS)]
    for given in [layers] if isinstance(layers, str) else list(layers or ()):
        path, part = split_slice(given)
        if path not in modules:
            near = difflib.get_close_matches(path, containers, n=3, cutoff=0.3) or containers[:8]
            found.append(
                f"layers={given!r} does not exist in {type(module).__name__}; its containers of modules: "
                f"{', '.join(near) or 'none'}"
            )
        elif not isinstance(modules[path], CONTAINERS) or not children_of(modules[path]):
            found.append(
                f"layers={given!r} is a {type(modules[path]).__name__}, not a ModuleList, Sequential or ModuleDict "
                f"with layers in it; its containers of modules: {', '.join(containers[:8]) or 'none'}"
            )
        elif not named_run(module, given).layers:
            numbers = "" if part is None else f" in that slice of {len(children_of(modules[path]))} children"
            found.append(f"layers={given!r} has no module with parameters{numbers}; name another container")
    return found


def first_names(module: nn.Module) -> dict[str, str]:
    """Map each name of a parameter or buffer to its name by the first path of the module that has it.

    A module that is registered twice is one module; a parameter that two modules share keeps both names.
    """
    first_paths = dict[nn.Module, str]((child, path) for path, child in module.named_modules())
    found = {}
    for path, child in module.named_modules(remove_duplicate=False):
        for name, _ in chain(child.named_parameters("", False, False), child.named_buffers("", False, False)):
            found[_joined(path, name)] = _joined(first_paths[child], name)
    return found


def owner_of(name: str, paths: Collection[str]) -> str | None:
    """Find the innermost of some modules around a parameter or a module; not that module itself.

    Args:
        name: The path of the parameter or module.
        paths: Paths of modules.
    """
    path = name
    while path:
        path = path.rpartition(".")[0]
        if path in paths:
            return path
    return None


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _stacks(module: nn.Module, runs: Sequence[LayerRun], first_paths: Mapping[nn.Module, str]) -> tuple[Stack, ...]:
    """Stacks of runs, each layer in one of them: the longest, as in ``self.backbone = nn.Sequential(*blocks[:2])``."""
    taken: set[nn.Module] = set()
    found = {}
    for run in sorted(runs, key=lambda run: -len(set(run.layers))):
        layers = [child for path in run.layers if (child := module.get_submodule(path)) not in taken]
        if layers:
            found[run] = _describe(run, layers, first_paths)
        taken.update(layers)
    return tuple(found[run] for run in runs if run in found)


def _describe(run: LayerRun, layers: Sequence[nn.Module], first_paths: Mapping[nn.Module, str]) -> Stack:
    types = dict.fromkeys(type(layer).__name__ for layer in layers)
    parameters = {parameter for layer in layers for parameter in layer.parameters()}
    return Stack(
        run.path,
        tuple(first_paths[layer] for layer in layers),
        "|".join(types),
        sum(parameter.numel() for parameter in parameters),
        is_chain=run.is_chain and len(set(layers)) == len(layers),
    )


def _parametrised_leaves(module: nn.Module) -> list[str]:
    return [
        path for path, child in module.named_modules() if path and any(True for _ in child.parameters(recurse=False))
    ]


def _large(module: nn.Module, path: str) -> list[str]:
    """The smallest submodules with a `forward` and submodules of their own that reach the size of a unit."""
    found = []
    for name, child in module.named_children():
        child_path = f"{path}.{name}" if path else name
        below = _large(child, child_path)
        is_callable = not isinstance(child, nn.ModuleList | nn.ModuleDict) and any(True for _ in child.children())
        found += below or ([child_path] if is_callable and _numel(child) >= LARGE_UNIT_NUMEL else [])
    return found


def _shared_with_outside(module: nn.Module, paths: Sequence[str]) -> dict[str, str]:
    names: dict[nn.Parameter, list[str]] = defaultdict(list)
    first = first_names(module)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if first[name] == name or _is_below(name, paths):
            names[parameter].append(name)
    found: dict[str, str] = {}
    for aliases in names.values():
        for path in paths if len(aliases) > 1 else ():
            outside = [alias for alias in aliases if not _is_below(alias, [path])]
            if outside and len(outside) < len(aliases):
                found.setdefault(path, outside[0])
    return found


def _is_below(path: str, ancestors: Sequence[str]) -> bool:
    return any(path == ancestor or path.startswith(f"{ancestor}.") for ancestor in ancestors)


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())

"""Search for runs of repeated layers among the children of containers. Nothing here runs a module."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclass(frozen=True)
class LayerRun:
    """Repeated layers in one container.

    Args:
        path: The container's path, with a slice of its children, as in ``"net.1:-1"``, unless the layers are in all.
        layers: The layers' paths, in order; a layer that stands at several places has several.
        is_chain: Whether each layer takes what the one before it has returned, as far as the structure shows.
    """

    path: str
    layers: tuple[str, ...]
    is_chain: bool = True


_Find = Callable[[nn.Module, str], Iterator[LayerRun]]


def split_slice(path: str) -> tuple[str, slice | None]:
    """Separate a slice of children from the path of their container: ``"net.1:-1"`` is ``"net"`` and ``[1:-1]``.

    Args:
        path: As users write it.

    Returns:
        The container's path, and the slice, or ``None`` where the path has none.
    """
    container, _, last = path.rpartition(".")
    ends = last.split(":")
    if len(ends) != 2 or not all(not end or end.removeprefix("-").isdecimal() for end in ends):
        return path, None
    start, stop = (int(end) if end else None for end in ends)
    return container, slice(start, stop)


def named_run(module: nn.Module, path: str) -> LayerRun:
    """The layers in a container that a user names: its children with parameters, and for lists of lists theirs.

    Args:
        module: The whole module.
        path: The container's path, with a slice or without.
    """
    container_path, part = split_slice(path)
    children = children_of(module.get_submodule(container_path))
    names = list(children)[part or slice(None)]
    layers = [layer for name in names for layer in _callable_layers(name, children[name])]
    layers = layers or [leaf for name in names for leaf in _callable_leaves(name, children[name])]
    return LayerRun(path, tuple(_joined(container_path, layer) for layer in layers), _is_chain(children, layers))


def search(module: nn.Module) -> list[LayerRun]:
    """Find runs of repeated layers in the outermost containers, else lists of one layer, which a step may call again.

    Args:
        module: Any module.
    """
    runs = list(_outermost(module, _runs)) or list(_outermost(module, _single))
    layers = {run: [module.get_submodule(path) for path in run.layers] for run in runs}
    inside = {inner for each in layers.values() for layer in each for inner in layer.modules() if inner is not layer}
    return [run for run in runs if not inside.issuperset(layers[run])]  # ``self.experts = self.layers[0].experts``


def joined_behind_each(layers: Sequence[str]) -> str:
    """In words, the `layers` by which sequences are joined behind each layer; empty if there is only one of them.

    Args:
        layers: The paths of the layers.
    """
    parts = [path.rpartition(".") for path in dict.fromkeys(layers)]
    if len(parts) < 2 or not all(name.isdecimal() for _, _, name in parts):
        return ""
    slices = [f"{container}.{name}:{int(name) + 1}" for container, _, name in parts]
    more = ", ..." if len(slices) > 4 else ""
    return f"layers=[{', '.join(slices[:4])}{more}], which makes a stack of each layer"


def children_of(container: nn.Module) -> dict[str, nn.Module]:
    """The children by name; `named_children` would leave out a child that is registered a second time."""
    return {name: child for name, child in container._modules.items() if child is not None}


def _outermost(
    module: nn.Module, find: _Find, path: str = "", without: frozenset[str] = frozenset()
) -> Iterator[LayerRun]:
    for name, child in module.named_children():
        if name in without:
            continue
        inside = _joined(path, name)
        runs = list(find(child, inside))
        yield from runs
        prefix = len(inside) + 1
        taken = frozenset(layer[prefix:].partition(".")[0] for run in runs for layer in run.layers)
        yield from _outermost(child, find, inside, taken)


def _single(container: nn.Module, path: str) -> Iterator[LayerRun]:
    children = children_of(container)
    if type(container) is nn.ModuleList and len(children) == 1:
        yield from (LayerRun(path, (f"{path}.{name}",)) for name, child in children.items() if _is_one(child))


def _runs(container: nn.Module, path: str) -> Iterator[LayerRun]:
    children = children_of(container)
    if not isinstance(container, CONTAINERS) or len(children) < 2:
        return
    if isinstance(container, nn.ModuleList) and all(map(_is_list, children.values())):
        layers = [layer for name in children for layer in _callable_layers(name, children[name])]
        if len(layers) > 1:
            yield LayerRun(path, tuple(f"{path}.{layer}" for layer in layers), _is_chain(children, layers))
    elif len({type(child) for child in children.values()}) == 1:
        if all(map(_is_layer, children.values())):
            yield LayerRun(path, tuple(f"{path}.{name}" for name in children))
    elif not isinstance(container, nn.ModuleDict):
        for names in _alike(children, is_sequential=isinstance(container, nn.Sequential)):
            part = _sliced(path, list(children), names)
            yield LayerRun(part, tuple(f"{path}.{name}" for name in names), _is_chain(children, names))


def _sliced(path: str, children: Sequence[str], names: Sequence[str]) -> str:
    start, stop = children.index(names[0]), children.index(names[-1]) + 1
    return path if stop - start == len(children) else f"{path}.{start}:{stop}"


def _callable_layers(name: str, child: nn.Module) -> Iterator[str]:
    """The layer itself, or those in a list, which has no forward; names from the container on."""
    if not _is_list(child):
        if _has_parameters(child):
            yield name
        return
    for inner_name, inner in children_of(child).items():
        if _is_layer(inner) or _is_list(inner):
            yield from _callable_layers(f"{name}.{inner_name}", inner)


def _callable_leaves(name: str, child: nn.Module) -> Iterator[str]:
    for path, inner in child.named_modules():
        if path and _has_parameters(inner) and not any(True for _ in inner.children()):
            yield f"{name}.{path}"


def _is_chain(children: Mapping[str, nn.Module], layers: Sequence[str]) -> bool:
    """Whether code of the user's can only hand hidden states from layer to layer.

    In a list of lists it may add residuals around parts of a layer, unless all are layers of one class. What stands
    between layers and has parameters may mix positions.
    """
    if not layers or any("." in layer for layer in layers):
        lists = [children_of(child) for child in children.values()]
        return len({type(inner) for each in lists for inner in each.values()}) == 1
    names = [name for name, child in children.items() if _has_parameters(child)]
    return names.index(layers[-1]) - names.index(layers[0]) + 1 == len(layers)


# Runs of several classes, or beside other children ------------------------------------------------------------------


def _alike(children: Mapping[str, nn.Module], *, is_sequential: bool) -> Iterator[list[str]]:
    """Names of neighbouring layers, those without children of their own between them left out."""
    run: list[str] = []
    for name, child in children.items():
        if not _has_parameters(child) or not any(True for _ in child.children()):
            continue
        # A stage that is a plain container is looked into instead: its layers are smaller.
        is_layer = _is_one(child) and not any(True for _ in _runs(child, ""))
        if run and not (is_layer and (is_sequential or _are_alike(type(children[run[-1]]), type(child)))):
            yield from _repeated(run, children)
            run = []
        run += [name] if is_layer else []
    yield from _repeated(run, children)


def _repeated(run: Sequence[str], children: Mapping[str, nn.Module]) -> Iterator[list[str]]:
    """The part of a run between classes that are not repeated: a prologue and an epilogue may look like layers."""
    names = list(run)
    while len(names) > 1 and len({type(children[name]) for name in names}) > 1:
        repeated = {type(children[name]) for name in names[1:-1]}
        if type(children[names[0]]) not in repeated:
            del names[0]
        elif type(children[names[-1]]) not in repeated:
            del names[-1]
        else:
            break
    if len(names) > 1:
        yield names


def _are_alike(first: type[nn.Module], second: type[nn.Module]) -> bool:
    """Whether layers of both classes can stand in one stack: by a base of the user's, or by their arguments."""
    bases = (base for base in first.__mro__ if issubclass(base, nn.Module) and issubclass(second, base))
    if any(base.__module__.partition(".")[0] not in ("torch", "lightning", "typing") for base in bases):
        return True
    return _arguments(first) == _arguments(second)


def _arguments(cls: type[nn.Module]) -> list[str]:
    return list(inspect.signature(cls.forward).parameters)


def _is_layer(module: nn.Module) -> bool:
    # A list of bare linear maps or embeddings is not a stack: user code often reads their weights without calling them.
    return not _is_list(module) and _has_parameters(module) and any(True for _ in module.children())


def _is_one(module: nn.Module) -> bool:
    return _is_layer(module) and type(module) not in CONTAINERS


def _is_list(module: nn.Module) -> bool:
    """Whether nobody can call it."""
    return isinstance(module, nn.ModuleList | nn.ModuleDict) and type(module).forward is nn.Module.forward


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name

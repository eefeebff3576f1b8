"""A module with most layers of its stacks left out for a while: what it would be, had it been built with fewer."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest

from torch import nn

from lightning_parallel.module.layer_stacks import ModuleStructure


@dataclass(frozen=True)
class ShortStacks:
    """The layers to leave out.

    Args:
        left_out: Their paths.
        num_layers: The number of layers with them.

    Example:
        >>> with short.applied(module):
        ...     module.training_step(batch, 0)  # goes through the first and the last layer of each stack
    """

    left_out: tuple[str, ...]
    num_layers: int

    def __str__(self) -> str:
        return f"{self.num_layers - len(self.left_out)} of {self.num_layers} layers"

    @contextmanager
    def applied(self, module: nn.Module) -> Iterator[None]:
        """Inside this context, `module` has no other layers; those that follow take the numbers of those left out.

        Args:
            module: The module, or a copy of it.
        """
        parents = [module.get_submodule(path) for path in dict.fromkeys(map(_parent, self.left_out))]
        left_out = {id(module.get_submodule(path)) for path in self.left_out}
        before = [(parent._modules, dict(parent._modules)) for parent in parents]
        try:
            for children, all_of_them in before:
                kept = {name: child for name, child in all_of_them.items() if id(child) not in left_out}
                is_numbered = list(all_of_them) == [str(index) for index in range(len(all_of_them))]
                children.clear()
                children.update(zip(map(str, range(len(kept))), kept.values(), strict=True) if is_numbered else kept)
            yield
        finally:
            for children, all_of_them in before:
                children.clear()
                children.update(all_of_them)


def short_stacks(module: nn.Module, structure: ModuleStructure, room: int) -> ShortStacks | None:
    """The layers without which the parameters of `module` take at most `room` bytes.

    The first and the last layer of each stack stay: sequences are split at the one, and joined at the other.

    Args:
        module: The module, which is not changed.
        structure: Its stacks.
        room: The bytes.

    Returns:
        ``None`` if there is no room for the rest of the module and two layers of each stack.
    """
    stacks = [list(dict.fromkeys(stack.layers)) for stack in structure.stacks]
    inner = [path for row in zip_longest(*(layers[1:-1] for layers in stacks)) for path in row if path is not None]
    left_out = list(inner)
    if not left_out or parameter_bytes(module, left_out) > room:
        return None
    for path in inner:
        rest = [each for each in left_out if each != path]
        if parameter_bytes(module, rest) > room:
            break
        left_out = rest
    return ShortStacks(tuple(left_out), sum(map(len, stacks)))


def parameter_bytes(module: nn.Module, left_out: Collection[str] = ()) -> int:
    """The bytes of the parameters of `module`, each counted once.

    Args:
        module: The module; it may be on the meta device.
        left_out: Paths of submodules; parameters that are nowhere else do not count.
    """
    without = {id(child) for path in left_out for child in module.get_submodule(path).modules()}
    found = {p for child in module.modules() if id(child) not in without for p in child._parameters.values()}
    return sum(parameter.numel() * parameter.itemsize for parameter in found if parameter is not None)


def _parent(path: str) -> str:
    return path.rpartition(".")[0]

"""What a module was before it was made parallel, so that all that was added can be taken off again. Layer 1.

Torch has no inverse of `fully_shard`: it changes the class, adds hooks and attributes, and puts other parameter
objects in place of the module's own. We note what stood there before, see what has changed after, and undo exactly
that difference: what the user changes during training is not touched. The module gets its own parameter *objects*
back, so an optimizer or a list that was made before training still refers to them afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_parallel import _torch

_KEPT_APART = ("_parameters", "_buffers", "_modules", "training")


@dataclass
class _Before:
    """One submodule's class, attributes, children, parameters and hooks; after `close`, only what has changed."""

    cls: type[nn.Module]
    attributes: dict[str, Any]
    children: dict[str, nn.Module | None]
    parameters: dict[str, nn.Parameter]
    hooks: dict[str, set[int]]
    added_attributes: set[str] = field(default_factory=set)

    @classmethod
    def take(cls, module: nn.Module) -> _Before:
        return cls(
            cls=type(module),
            attributes=_attributes(module),
            children=dict(module._modules),
            parameters={name: p for name, p in module._parameters.items() if p is not None},
            hooks={table: set(getattr(module, table, ())) for table in _torch.modules.HOOK_TABLES},
        )

    def keep_difference(self, module: nn.Module) -> None:
        now = _attributes(module)
        self.added_attributes = now.keys() - self.attributes.keys()
        self.attributes = {k: v for k, v in self.attributes.items() if k in now and now[k] is not v}
        self.children = {k: v for k, v in self.children.items() if module._modules.get(k) is not v}
        # What another footprint inside of this one made is its to give back; holding it would hold its memory.
        self.parameters = {
            k: v
            for k, v in self.parameters.items()
            if module._parameters.get(k) is not v and not isinstance(v, DTensor)
        }
        self.hooks = {table: set(getattr(module, table, ())) - keys for table, keys in self.hooks.items()}

    def undo(self, module: nn.Module) -> None:
        module.__class__ = self.cls
        _torch.fsdp.forget_sharding(module)
        for table, added in self.hooks.items():
            for key in added:
                getattr(module, table).pop(key, None)
        for name in self.added_attributes:
            module.__dict__.pop(name, None)
        module.__dict__.update(self.attributes)
        module._modules.update(self.children)


class Snapshot:
    """Notes a module before it is made parallel; give it back with `restore`.

    Args:
        module: The whole module, before anything is applied to it.

    Example:
        >>> with Footprint(module) as footprint:
        ...     ...  # apply techniques
        >>> ...  # train
        >>> footprint.restore(gather)
    """

    def __init__(self, module: nn.Module) -> None:
        self._befores = {submodule: _Before.take(submodule) for submodule in module.modules()}
        self._strides = {p: p.stride() for before in self._befores.values() for p in before.parameters.values()}

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(self, *error: object) -> None:
        """Note what was changed; from here on, changes are the user's. Frees the memory of replaced parameters."""
        for module, before in self._befores.items():
            before.keep_difference(module)
        self._strides = {original: self._strides[original] for original, _ in self.replaced()}
        for original, _ in self.replaced():
            if not original.is_meta:
                original.data = original.data.new_empty(0)

    def replaced(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        """Pairs of the module's own parameter and what stands in its place, each pair once."""
        seen: set[nn.Parameter] = set()
        for module, before in self._befores.items():
            for name, original in before.parameters.items():
                current = module._parameters[name]
                if original not in seen and current is not None:
                    seen.add(original)
                    yield original, current

    @torch.no_grad()
    def restore(self, gather: Callable[[Tensor], Tensor]) -> dict[Tensor, nn.Parameter]:
        """Undo the difference. Returns what stood in a parameter's place -> the module's own parameter.

        Args:
            gather: From what stands in a parameter's place to its whole value; a collective where it is sharded.
        """
        back: dict[Tensor, nn.Parameter] = {}
        for original, current in self.replaced():
            back[current] = self._refill(original, gather(current), current.requires_grad)
        for module, before in self._befores.items():
            for name, original_child in before.children.items():
                _hand_back(module._modules.get(name), original_child)
            standing = {name: back[module._parameters[name]] for name in before.parameters}  # type: ignore[index]
            before.undo(module)
            for name, parameter in standing.items():
                # Not into the table: modules such as nn.LSTM keep a second list of their weights.
                setattr(module, name, parameter)
        return back

    def _refill(self, original: nn.Parameter, value: Tensor, requires_grad: bool) -> nn.Parameter:
        if original.is_meta:
            return nn.Parameter(value, requires_grad=requires_grad)
        if value.stride() != self._strides[original]:
            value = torch.empty_strided(
                value.shape, self._strides[original], dtype=value.dtype, device=value.device
            ).copy_(value)
        original.data = value
        original.grad = None
        original.requires_grad_(requires_grad)
        return original


def _hand_back(current: nn.Module | None, original: nn.Module | None) -> None:
    """Give a module that comes back what its stand-in holds under the same names: training may have replaced it."""
    if current is None or original is None:
        return
    original.training = current.training
    for table in ("_parameters", "_buffers"):
        own, theirs = getattr(original, table), getattr(current, table)
        own.update({name: theirs[name] for name in own if name in theirs})


def _attributes(module: nn.Module) -> dict[str, Any]:
    apart = {*_KEPT_APART, *_torch.modules.HOOK_TABLES}
    return {name: value for name, value in module.__dict__.items() if name not in apart}

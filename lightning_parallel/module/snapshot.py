"""The state of a module before it was made parallel, so that all that was added can be taken off again.

Torch has no inverse of `fully_shard`: it changes the class, adds hooks and attributes, and puts other parameter
objects in place of the module's own. We note what stood there before, see what has changed after, and undo exactly
that difference: what the user changes during training is not touched. The module gets its own parameter *objects*
back, so an optimizer or a list that was made before training still refers to them afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_parallel import _torch
from lightning_parallel.module.object_state import Contents

_KEPT_APART = ("_parameters", "_buffers", "_modules", "training", *_torch.modules.HOOK_TABLES)


class _ModuleState:
    """One submodule's class, attributes, children, parameters and hooks; after `keep_changes`, what has changed."""

    def __init__(self, module: nn.Module) -> None:
        # What another snapshot around this one has seen replaced is its to give back; holding it would hold its memory.
        self.parameters = {
            name: p for name, p in module._parameters.items() if p is not None and not isinstance(p, DTensor)
        }
        self.children = Contents(module._modules)
        self._module, self._cls = module, type(module)
        self._others = [Contents(getattr(module, table)) for table in _torch.modules.HOOK_TABLES]
        self._others.append(Contents(vars(module), lambda name, _: name not in _KEPT_APART))

    def keep_changes(self) -> None:
        for contents in (*self._others, self.children):
            contents.keep_changes()
        self.parameters = {
            name: own for name, own in self.parameters.items() if self._module._parameters.get(name) is not own
        }

    def undo(self) -> None:
        self._module.__class__ = self._cls
        _torch.fsdp.forget_sharding(self._module)
        for contents in (*self._others, self.children):
            contents.restore()


class Snapshot:
    """Notes a module before it is made parallel; give it back with `restore`.

    Args:
        module: The whole module, before anything is applied to it.

    Example:
        >>> with Snapshot(module) as snapshot:
        ...     ...  # apply techniques
        >>> ...  # train
        >>> snapshot.restore(gather)
    """

    def __init__(self, module: nn.Module) -> None:
        # A scripted module is an object of C++: it has no tables that anybody could change.
        self._states = {
            submodule: _ModuleState(submodule)
            for submodule in module.modules()
            if not isinstance(submodule, torch.jit.ScriptModule)
        }
        self._strides = {p: p.stride() for state in self._states.values() for p in state.parameters.values()}

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(self, *error: object) -> None:
        """Note what was changed; from here on, changes are the user's. Frees the memory of replaced parameters."""
        for state in self._states.values():
            state.keep_changes()
        self._strides = {original: self._strides[original] for original, _ in self.replaced()}
        for original, _ in self.replaced():
            if not original.is_meta:
                original.data = original.data.new_empty(0)

    def replaced(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        """Pairs of the module's own parameter and what stands in its place, each pair once."""
        seen: set[nn.Parameter] = set()
        for module, state in self._states.items():
            for name, original in state.parameters.items():
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
        for module, state in self._states.items():
            for name, original_child in state.children.before.items():
                _hand_back(module._modules.get(name), original_child)
            standing = {name: back[module._parameters[name]] for name in state.parameters}  # type: ignore[index]
            state.undo()
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
    """Give a module that comes back the values of its replacement: training may have changed them."""
    if current is None or original is None:
        return
    original.training = current.training
    for table in ("_parameters", "_buffers"):
        own, theirs = getattr(original, table), getattr(current, table)
        own.update({name: theirs[name] for name in own if name in theirs})

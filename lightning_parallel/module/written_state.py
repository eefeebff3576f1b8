"""State that a step of the user's keeps in a module: buffers that it writes into, numbers and lists that it changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_parallel.module.placeholders import placeholders_in

_NUMBERS = (bool, int, float)
_LISTS = (list, dict, set)
_MOST = 1 << 20
"""Numbers that are sent from one stage to the others after a step; more of them are data."""


class WrittenState:
    """Notes what modules hold, to say later what has been written since.

    A tensor of several elements that replaces another one is no such state: it is that of the last call, however many
    there were before. Names that begin with an underscore belong to frameworks, except those of buffers.

    Args:
        modules: Path -> module.

    Example:
        >>> state = WrittenState({"head": spectral_norm(nn.Linear(4, 4))})
        >>> ...  # a step
        >>> state.changed()
        ['head.parametrizations.weight.0._u', 'head.parametrizations.weight.0._v']
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = dict(modules)
        self._before = dict(self._values())
        self._marks = {name: _mark(value) for name, value in self._before.items()}

    def changed(self) -> list[str]:
        """Names of buffers and attributes that have other contents now; of those that were there before only."""
        now = dict(self._values())
        return [name for name in self._before if name in now and self._is_changed(name, now[name])]

    def news(self) -> dict[str, Any]:
        """Contents of attributes that have changed, for `follow` of the same modules elsewhere; without buffers.

        Only numbers, text and tensors, alone or in containers; tensors in host memory. Of a list that has grown, the
        new entries. What is too large for the state of a step is left out.
        """
        buffers = {f"{path}.{name}" if path else name for path, m in self._modules.items() for name in m._buffers}
        now = dict(self._values())
        found = {}
        for name in self.changed():
            begun = self._marks[name] if isinstance(now[name], list) and name in self._marks else 0
            value = now[name][begun:] if isinstance(now[name], list) else now[name]
            if name not in buffers and _is_plain(value):
                found[name] = tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), value)
        return found

    def follow(self, news: Mapping[str, Any], device: torch.device) -> None:
        """Let attributes hold what they hold elsewhere.

        Args:
            news: From `news`.
            device: Where tensors are wanted.
        """
        for name, value in tree_map_only(Tensor, lambda tensor: tensor.to(device), dict(news)).items():
            path, _, attribute = name.rpartition(".")
            own = vars(self._modules[path]).get(attribute)
            if isinstance(own, list) and isinstance(value, list):
                own[self._marks[name] :] = value
            elif isinstance(own, dict | set):
                own.clear()
                own.update(value)
            else:
                setattr(self._modules[path], attribute, value)

    def _is_changed(self, name: str, value: Any) -> bool:
        before = self._before[name]
        if isinstance(value, Tensor) and isinstance(before, Tensor) and value is not before:
            return value.numel() == 1
        return bool(_mark(value) != self._marks[name])

    def _values(self) -> Iterator[tuple[str, Any]]:
        for path, module in self._modules.items():
            begin = f"{path}." if path else ""
            yield from ((f"{begin}{name}", buffer) for name, buffer in module.named_buffers(recurse=False))
            for name, value in vars(module).items():
                if not name.startswith("_") and name != "training" and isinstance(value, (*_NUMBERS, *_LISTS, Tensor)):
                    yield f"{begin}{name}", value


def _is_plain(value: Any) -> bool:
    leaves = tree_leaves(list(value) if isinstance(value, set) else value)
    if len(leaves) > _MOST or not all(isinstance(leaf, (*_NUMBERS, str, Tensor)) for leaf in leaves):
        return False
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return not placeholders_in(tensors) and sum(tensor.numel() for tensor in tensors) <= _MOST


def _mark(value: Any) -> Any:
    """Something that is another one once `value` has been written into."""
    if isinstance(value, Tensor):
        return None if value.is_inference() else value._version
    return len(value) if isinstance(value, _LISTS) else value

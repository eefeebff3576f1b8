"""The arguments with which a step calls some layers, taken from the step itself."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.hooks import RemovableHandle

from lightning_parallel.module.kv_cache import is_cache

_MOST_SHOWN = 6


class StepLeft(BaseException):
    """Exit from a step that has shown what it was run for; no ``except Exception`` of the user's catches it."""


@dataclass(frozen=True)
class LayerCall:
    """One call of a layer.

    Args:
        args: Its arguments by position, in the step's own tensors.
        kwargs: Those by name.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def device(self) -> torch.device:
        """Of its tensors; the host where it has none."""
        tensors = (leaf for leaf in tree_leaves((self.args, dict(self.kwargs))) if isinstance(leaf, Tensor))
        return next((tensor.device for tensor in tensors), torch.device("cpu"))

    def on(self, device: torch.device, dtypes: Collection[torch.dtype] = ()) -> tuple[list[Any], dict[str, Any]]:
        """Arguments of the same shapes and kinds on `device`, which may be the meta device; without caches.

        The first floating-point tensor, which is the hidden states, requires a gradient; others do if they did.

        Args:
            device: The device.
            dtypes: Those of the layer's parameters. Mixed precision gives a layer tensors of a narrower one, and casts
                its parameters.
        """
        copies: dict[int, Tensor] = {}
        widest = max((dtype for dtype in dtypes if dtype.is_floating_point), key=lambda d: d.itemsize, default=None)

        def copy_of(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return None if is_cache(value) else value
            if id(value) not in copies:
                copy = torch.empty_like(value, device=device) if device.type == "meta" else value.detach().clone()
                if widest is not None and value.is_floating_point() and value.itemsize < widest.itemsize:
                    copy = copy if value.dtype in dtypes else copy.to(widest)
                is_hidden = not any(each.is_floating_point() for each in copies.values())
                requires_grad = value.is_floating_point() and (value.requires_grad or is_hidden)
                copies[id(value)] = copy.requires_grad_(requires_grad)
            return copies[id(value)]

        args, kwargs = tree_map(copy_of, (list(self.args), dict(self.kwargs)))
        return args, kwargs

    def __str__(self) -> str:
        """Shapes and kinds, such as ``[2, 4, 4, 16], mask=None``."""
        named = [*(("", value) for value in self.args), *((f"{name}=", value) for name, value in self.kwargs.items())]
        shown = [f"{name}{_kind(value)}" for name, value in named]
        return ", ".join([*shown[:_MOST_SHOWN], *(["..."] if len(shown) > _MOST_SHOWN else [])])


class RecordedCalls:
    """Take the first call of a layer of each kind, while this is open. The step is left when all are there.

    Args:
        module: The module whose step runs.
        kinds: For each kind the paths of its layers.

    Attributes:
        found: Path of a layer -> its call; at most one layer of a kind.

    Example:
        >>> with RecordedCalls(module, [["layers.0", "layers.1"]]) as calls:
        ...     module.training_step(batch, 0)
        >>> calls.found["layers.0"].args
    """

    def __init__(self, module: nn.Module, kinds: Sequence[Sequence[str]]) -> None:
        self._module, self._kinds = module, kinds
        self._handles: list[RemovableHandle] = []
        self.found: dict[str, LayerCall] = {}

    def __enter__(self) -> RecordedCalls:
        for kind, paths in enumerate(self._kinds):
            for path in paths:
                self._register(kind, path)
        return self

    def __exit__(self, cls: type[BaseException] | None, error: BaseException | None, traceback: Any) -> bool:
        for handle in self._handles:
            handle.remove()
        return isinstance(error, StepLeft)

    def _register(self, kind: int, path: str) -> None:
        def take(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self.found.keys().isdisjoint(self._kinds[kind]):
                self.found[path] = LayerCall(args, kwargs)
            if len(self.found) == len(self._kinds):
                raise StepLeft

        # Before the user's own hooks, which change arguments, and will do so again when the layer runs once more.
        layer = self._module.get_submodule(path)
        self._handles.append(layer.register_forward_pre_hook(take, prepend=True, with_kwargs=True))


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return str(list(value.shape))
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_kind, value))})"
    return type(value).__name__

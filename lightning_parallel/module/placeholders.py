"""Tensors that have a shape and no memory: what another pipeline stage holds or computes. Layer 1.

A stage runs all of the user's step, of which only a part is its own. Parameters of other stages are ghosts there, and
whatever is computed with a ghost is a ghost, at no cost of memory or arithmetic. So nothing of another stage can get
into a result unseen: what a stage may use is exactly what is no ghost.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from lightning_parallel import _torch
from lightning_parallel.errors import ConfigurationError

_READING = ("_local_scalar_dense", "item", "equal", "is_nonzero", "nonzero", "masked_select")


class PlaceholderReadError(ConfigurationError):
    """A step wants the value of a tensor that has none."""


@dataclass(frozen=True)
class Watch:
    """What watches operations on ghosts.

    Args:
        stage: The stage that would compute now.
        touch: Takes the name of a parameter that an operation takes.
        refuse: Takes a ghost of another stage that an operation takes.
    """

    stage: Callable[[], int]
    touch: Callable[[str], None]
    refuse: Callable[[Placeholder], None]


class Placeholder(Tensor):
    """A tensor of which only shape, dtype and device are known.

    Args:
        meta: Its shape and dtype, on the meta device.
        device: Where it would be.
        sources: Names of the parameters that it comes from.
        watch: What watches operations on it, if anything does.
        stage: Which stage has computed it; ``None`` for a parameter.
    """

    meta: Tensor
    sources: frozenset[str]
    watch: Watch | None
    stage: int | None
    __torch_function__ = _torch.modes.NO_FUNCTION_OVERRIDE  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, meta: Tensor, device: torch.device, *_: Any, **__: Any) -> Placeholder:
        """A tensor without a storage."""
        return _torch.tensors.tensor_without_storage(cls, meta, device)  # type: ignore[no-any-return]

    def __init__(
        self,
        meta: Tensor,
        device: torch.device,
        sources: frozenset[str] = frozenset(),
        watch: Watch | None = None,
        stage: int | None = None,
    ) -> None:
        self.meta = meta
        self.sources = sources
        self.watch = watch
        self.stage = stage

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Do `func` on the meta device."""
        kwargs = dict(kwargs or {})
        placeholders = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Placeholder)]
        watch, stage = _watch(placeholders)
        sources = frozenset().union(*(placeholder.sources for placeholder in placeholders))
        name = func.overloadpacket.__name__
        if name in _READING:
            raise PlaceholderReadError([_read(sources)])
        if func._schema.is_mutable and not isinstance(args[0], Placeholder) and name.endswith("_"):
            raise PlaceholderReadError([_written(sources)])
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("meta")
        compute = _grouped_product if name == "_grouped_mm" else func
        try:
            result = compute(*tree_map(_to_meta, args), **tree_map(_to_meta, kwargs))
        except (RuntimeError, NotImplementedError) as error:
            raise PlaceholderReadError([_unknown(name, sources, error)]) from error
        _torch.tensors.follow_view(func, args, kwargs)
        own = {id(placeholder.meta): placeholder for placeholder in placeholders}
        device = placeholders[0].device

        def as_ghost(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return own[id(value)] if id(value) in own else Placeholder(value, device, sources, watch, stage)

        return tree_map(as_ghost, result)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Shape, dtype and where it comes from."""
        return f"Ghost({tuple(self.shape)}, {self.dtype}, of {', '.join(sorted(self.sources))})"


def placeholder_like(
    tensor: Tensor, source: str = "", watch: Watch | None = None, stage: int | None = None
) -> Placeholder:
    """A ghost with the shape, dtype and device of `tensor`, which may be on the meta device, sharded or a ghost."""
    sources = tensor.sources if isinstance(tensor, Placeholder) else frozenset()
    return Placeholder(_to_meta(tensor), tensor.device, frozenset({source}) if source else sources, watch, stage)


def placeholder_parameter(parameter: nn.Parameter, source: str, device: torch.device) -> nn.Parameter:
    """What stands in the place of a parameter that another stage holds; as trainable as that."""
    placeholder = Placeholder(_to_meta(parameter), device, frozenset({source}))
    return _torch.modules.as_parameter(placeholder.requires_grad_(parameter.requires_grad))  # type: ignore[no-any-return]


@contextlib.contextmanager
def placeholders_in_place(module: nn.Module, watch: Watch | None = None) -> Iterator[None]:
    """In here, all parameters of `module` are ghosts.

    Args:
        module: Any module.
        watch: What watches operations on them.
    """
    before: list[tuple[nn.Module, str, nn.Parameter]] = []
    stand_ins: dict[nn.Parameter, Placeholder] = {}
    for path, submodule in module.named_modules():
        for name, parameter in submodule._parameters.items():
            if parameter is not None:
                full = f"{path}.{name}" if path else name
                before.append((submodule, name, parameter))
                if parameter not in stand_ins:
                    stand_ins[parameter] = placeholder_like(parameter, full, watch)
    try:
        for submodule, name, parameter in before:
            setattr(submodule, name, _torch.modules.as_parameter(stand_ins[parameter]))
        yield
    finally:
        for submodule, name, parameter in before:
            setattr(submodule, name, parameter)


def is_placeholder(value: Any) -> bool:
    """Whether `value` is a tensor of another stage."""
    return isinstance(value, Placeholder)


def placeholders_in(values: Any) -> list[Placeholder]:
    """The ghosts among the tensors of nested containers."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Placeholder)]


def name_sources(placeholders: list[Placeholder]) -> str:
    """Where `placeholders` come from, for people."""
    names = sorted(frozenset().union(*(placeholder.sources for placeholder in placeholders)))
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _watch(placeholders: list[Placeholder]) -> tuple[Watch | None, int | None]:
    watch = next((placeholder.watch for placeholder in placeholders if placeholder.watch is not None), None)
    if watch is None:
        return None, None
    stage = watch.stage()
    for placeholder in placeholders:
        if placeholder.stage is None:
            for name in placeholder.sources:
                watch.touch(name)
        elif placeholder.stage != stage:
            watch.refuse(placeholder)
    return watch, stage


def _to_meta(value: Any) -> Any:
    if isinstance(value, Placeholder):
        return value.meta
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return value


def _grouped_product(rows: Tensor, matrices: Tensor, *others: Any, **options: Any) -> Tensor:
    """Rows in groups, each times its own matrix; torch has a shape of it for bfloat16 alone."""
    if rows.ndim != 2 or matrices.ndim != 3:
        raise NotImplementedError(f"of {rows.ndim} and {matrices.ndim} dimensions")
    return rows.new_empty(rows.shape[0], matrices.shape[2], dtype=options.get("out_dtype"))


def _unknown(name: str, sources: frozenset[str], error: Exception) -> str:
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return (
        f"torch cannot tell the shape of what {name} returns where another pipeline stage computes it (with "
        f"{', '.join(sorted(sources)[:4]) or 'other layers'}): {reason}. If the model has another implementation of "
        "this operation, choose it, or give pipeline=1"
    )


def _read(sources: frozenset[str]) -> str:
    return (
        f"the step looks at a value that another pipeline stage computes (with {', '.join(sorted(sources)[:4])}): an "
        ".item(), a print or a branch on what the layers compute can only be done after the last layer, with what "
        "comes out of it; leave it out, or give pipeline=1"
    )


def _written(sources: frozenset[str]) -> str:
    return (
        f"the step writes what another pipeline stage computes (with {', '.join(sorted(sources)[:4])}) into a tensor "
        "of this one; give pipeline=1"
    )

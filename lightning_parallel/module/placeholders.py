"""Placeholders: tensors with a shape and no memory, in place of what another pipeline stage holds or computes.

A stage runs all of the user's step, though only a part of it belongs to the stage. Parameters of other stages are
placeholders there, and any result computed with a placeholder is a placeholder too, without memory or arithmetic. So a
stage cannot use a value of another stage by mistake: it may use exactly the tensors that are not placeholders.
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
    """Refusal of a step that reads the value of a placeholder."""


@dataclass(frozen=True)
class Watch:
    """Callbacks for operations on placeholders.

    Args:
        stage: Returns the number of the stage that computes at this point of the step.
        touch: Called with the name of each parameter that an operation takes.
        refuse: Called with a placeholder that an operation takes though another stage computes it.
    """

    stage: Callable[[], int]
    touch: Callable[[str], None]
    refuse: Callable[[Placeholder], None]


class Placeholder(Tensor):
    """A tensor of which only shape, dtype and device are known.

    Args:
        meta: A tensor on the meta device that gives shape, strides and dtype.
        device: The device that it reports.
        sources: Names of the parameters from which it was computed.
        watch: Callbacks for operations on it, if there are any.
        stage: The number of the stage that computes it; ``None`` for a parameter.
    """

    meta: Tensor
    sources: frozenset[str]
    watch: Watch | None
    stage: int | None
    __torch_function__ = _torch.modes.NO_FUNCTION_OVERRIDE  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, meta: Tensor, device: torch.device, *_: Any, **__: Any) -> Placeholder:
        """Make the tensor, without a storage."""
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
        """Run `func` on the meta device, and return its results as placeholders."""
        kwargs = dict(kwargs or {})
        placeholders = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Placeholder)]
        watch, stage = _watch(placeholders)
        sources = frozenset().union(*(placeholder.sources for placeholder in placeholders))
        name = func.overloadpacket.__name__
        if name in _READING:
            raise PlaceholderReadError([_read(sources)])
        # Writing a placeholder into a real tensor would leave memory that nobody filled.
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
        # An operation in place returns one of its arguments: the caller must get the same object back.
        own = {id(placeholder.meta): placeholder for placeholder in placeholders}
        device = placeholders[0].device

        def as_placeholder(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return own[id(value)] if id(value) in own else Placeholder(value, device, sources, watch, stage)

        return tree_map(as_placeholder, result)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Shape, dtype and sources."""
        return f"Placeholder({tuple(self.shape)}, {self.dtype}, of {', '.join(sorted(self.sources))})"


def placeholder_like(
    tensor: Tensor, source: str = "", watch: Watch | None = None, stage: int | None = None
) -> Placeholder:
    """Make a placeholder with the shape, dtype and device of a tensor.

    Args:
        tensor: Any tensor, also one on the meta device, a shard or another placeholder.
        source: The name of the parameter that it replaces; if empty, the sources of `tensor` are taken over.
        watch: Callbacks for operations on it.
        stage: The number of the stage that computes it; ``None`` for a parameter.
    """
    sources = tensor.sources if isinstance(tensor, Placeholder) else frozenset()
    return Placeholder(_to_meta(tensor), tensor.device, frozenset({source}) if source else sources, watch, stage)


def placeholder_parameter(parameter: nn.Parameter, source: str, device: torch.device) -> nn.Parameter:
    """Make a placeholder for a parameter that another stage holds; it is trainable if that parameter is.

    Args:
        parameter: The parameter.
        source: Its name.
        device: The device that the placeholder reports.
    """
    placeholder = Placeholder(_to_meta(parameter), device, frozenset({source}))
    return _torch.modules.as_parameter(placeholder.requires_grad_(parameter.requires_grad))  # type: ignore[no-any-return]


@contextlib.contextmanager
def placeholders_in_place(module: nn.Module, watch: Watch | None = None) -> Iterator[None]:
    """Inside this context, all parameters of `module` are placeholders.

    Args:
        module: Any module.
        watch: Callbacks for operations on them.
    """
    before: list[tuple[nn.Module, str, nn.Parameter]] = []
    # One placeholder for each parameter, so that tied weights stay one object.
    placeholders: dict[nn.Parameter, Placeholder] = {}
    for path, submodule in module.named_modules():
        for name, parameter in submodule._parameters.items():
            if parameter is not None:
                full = f"{path}.{name}" if path else name
                before.append((submodule, name, parameter))
                if parameter not in placeholders:
                    placeholders[parameter] = placeholder_like(parameter, full, watch)
    try:
        for submodule, name, parameter in before:
            setattr(submodule, name, _torch.modules.as_parameter(placeholders[parameter]))
        yield
    finally:
        for submodule, name, parameter in before:
            setattr(submodule, name, parameter)


def is_placeholder(value: Any) -> bool:
    """Whether `value` is a placeholder."""
    return isinstance(value, Placeholder)


def placeholders_in(values: Any) -> list[Placeholder]:
    """The placeholders among the tensors of nested containers."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Placeholder)]


def name_sources(placeholders: list[Placeholder]) -> str:
    """Names of parameters from which `placeholders` were computed, at most four, for messages."""
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
    """Shape of a grouped matrix product, `[rows, outputs]`: torch itself infers it for bfloat16 only.

    `rows` is `[rows, inputs]`, `matrices` `[groups, inputs, outputs]`.
    """
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

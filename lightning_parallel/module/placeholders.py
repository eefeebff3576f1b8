"""Placeholders: tensors with a shape and no memory, in place of what another pipeline stage holds or computes.

A stage runs all of the user's step, with placeholders for parameters of other stages, and any result computed with one
is one, too, without memory or arithmetic. So no stage can use a value of another one by mistake.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from lightning_parallel import _torch
from lightning_parallel.errors import ConfigurationError, asking, is_asked_by_user, line_of_user
from lightning_parallel.ranks.host_reads import INSTEAD, at

_READING = ("_local_scalar_dense", "item", "equal", "is_nonzero", "nonzero", "masked_select")


class PlaceholderReadError(ConfigurationError):
    """Refusal of a step that reads the value of a placeholder."""


class PlaceholderWriteError(PlaceholderReadError):
    """Refusal of code that writes what another stage computes or holds into a tensor that has memory."""


@dataclass(frozen=True)
class Watch:
    """Callbacks for operations on placeholders.

    Args:
        stage: Returns the stage that computes at this point of the step.
        touch: Called with the name of each parameter that an operation takes.
        refuse: Called with a placeholder that an operation takes though another stage computes it.
        is_at_end: Returns whether no stage follows at this point: an operation may write into a real tensor.
    """

    stage: Callable[[], int]
    touch: Callable[[str], None]
    refuse: Callable[[Placeholder], None]
    is_at_end: Callable[[], bool] = lambda: False


class Placeholder(Tensor):
    """A tensor of which only shape, dtype and device are known.

    Args:
        meta: A tensor on the meta device that gives shape, strides and dtype.
        device: The device that it reports.
        sources: Names of the parameters from which it was computed.
        watch: Callbacks for operations on it, if there are any.
        stage: The number of the stage that computes it; ``None`` for a parameter.
        held_by: Ranks of the pipeline that hold its sources, where that is known.
    """

    meta: Tensor
    sources: frozenset[str]
    watch: Watch | None
    stage: int | None
    held_by: frozenset[int]
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
        held_by: frozenset[int] = frozenset(),
    ) -> None:
        self.meta = meta
        self.sources, self.held_by = sources, held_by
        self.watch = watch
        self.stage = stage

    @classmethod
    @_torch.modes.not_compiled
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Run `func` on the meta device, and return its results as placeholders."""
        kwargs = dict(kwargs or {})
        placeholders = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Placeholder)]
        watch, stage = _watch(placeholders)
        sources = frozenset().union(*(placeholder.sources for placeholder in placeholders))
        held_by = frozenset().union(*(placeholder.held_by for placeholder in placeholders))
        name = func.overloadpacket.__name__
        if name in _READING:
            raise PlaceholderReadError([_read(name.replace("_local_scalar_dense", "item"), sources, held_by)])
        # Writing a placeholder into a real tensor would leave memory that nobody filled.
        is_written = func._schema.is_mutable and _has_real(args[0] if name.endswith("_") else _outs_of(func, kwargs))
        if is_written and (watch is None or not watch.is_at_end()):
            raise PlaceholderWriteError([_written(sources, held_by)])
        if torch.Tag.nondeterministic_seeded in func.tags and asking(__name__) == "hook":
            func(*tree_map(_to_zeros, args), **tree_map(_to_zeros, kwargs))
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
            return own[id(value)] if id(value) in own else Placeholder(value, device, sources, watch, stage, held_by)

        return tree_map(as_placeholder, result)

    def refuse(self, read: str) -> NoReturn:
        """Refuse what needs its value.

        Args:
            read: What does, for the message.
        """
        raise PlaceholderReadError([_read(read, self.sources, self.held_by)])

    def numpy(self, *_: Any, **__: Any) -> Any:
        """Refused: there is no value."""
        self.refuse("numpy")

    def tolist(self) -> Any:
        """Refused: there is no value."""
        self.refuse("tolist")

    def __array__(self, *_: Any) -> Any:
        self.refuse("numpy")

    def __format__(self, spec: str) -> str:
        return repr(self) if not spec else self.refuse("format")

    def __deepcopy__(self, memo: Any) -> Any:
        return self.refuse("copy.deepcopy") if isinstance(self, nn.Parameter) or self.requires_grad else self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.refuse("torch.save, or pickle,")

    def register_hook(self, hook: Any) -> Any:
        """Refused: no gradient comes here."""
        self.refuse("register_hook")

    def retain_grad(self) -> None:
        """Refused: no gradient comes here, and where one comes, it is that of a microbatch."""
        self.refuse("retain_grad")

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        """The gradient, a placeholder too, where a hook or step of the user asks; optimizers and the like find none.

        Without it, a norm or a check over all gradients would be that of this rank's stages, and say nothing of it.
        """
        if self.watch is not None or not self.requires_grad:
            return None
        if asking(__name__) != "hook" and not is_asked_by_user(__name__):
            return None
        return Placeholder(
            self.meta, self.device, frozenset(map(_OF_GRADIENT.format, self.sources)), held_by=self.held_by
        )

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is not None and not isinstance(value, Placeholder):
            self.refuse("writing a gradient")

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


def placeholder_parameter(
    parameter: nn.Parameter, source: str, device: torch.device, held_by: Iterable[int] = ()
) -> nn.Parameter:
    """Make a placeholder for a parameter that another stage holds; it is trainable if that parameter is.

    Args:
        parameter: The parameter.
        source: Its name.
        device: The device that the placeholder reports.
        held_by: The ranks of the pipeline that hold it.
    """
    placeholder = Placeholder(_to_meta(parameter), device, frozenset({source}), held_by=frozenset(held_by))
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
    sources = frozenset[str]().union(*(placeholder.sources for placeholder in placeholders))
    return _named(sources) if sources else ""


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


def _to_zeros(value: Any) -> Any:
    """Real memory in place of a placeholder: drawing into it brings the stream to where it is on other ranks."""
    return torch.zeros_like(value.meta, device=value.device) if isinstance(value, Placeholder) else value


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


def _outs_of(func: Any, kwargs: dict[str, Any]) -> list[Any]:
    """The tensors that an operation is given for its results, as in ``torch.mul(x, 2, out=y)``."""
    return [kwargs.get(argument.name) for argument in func._schema.arguments if argument.is_out]


def _has_real(target: Any) -> bool:
    """Whether an operation in place writes into a tensor that is no placeholder; some take lists of tensors."""
    return any(isinstance(leaf, Tensor) and not isinstance(leaf, Placeholder) for leaf in tree_leaves(target))


def _read(read: str, sources: frozenset[str], held_by: frozenset[int]) -> str:
    return (
        f"{read} {at(line_of_user())} needs the value of {_named(sources)}, which only {_holder(held_by)} computes or "
        "holds. In a step, a value can only be looked at after the last layer, with what comes out of "
        f"it, or with schedule='turns'; in a hook, {INSTEAD}; else give pipeline=1"
    )


def _written(sources: frozenset[str], held_by: frozenset[int]) -> str:
    are_gradients = all(source.startswith(_OF_GRADIENT[:-2]) for source in sources)
    advice = _OF_NORMS if are_gradients else _AVERAGES if asking(__name__) == "hook" else _IN_STEP
    return (
        f"the code {at(line_of_user())} writes what {_holder(held_by)} computes or holds (with {_named(sources)}) into "
        f"a tensor of this rank, and its values are not here. {advice}; else give pipeline=1"
    )


def _named(sources: frozenset[str]) -> str:
    names = sorted(sources)
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "") or "other layers"


def _holder(ranks: frozenset[int]) -> str:
    numbers = " and ".join(map(str, sorted(ranks)))
    return f"another pipeline stage (pipeline rank {numbers})" if numbers else "another pipeline stage"


_OF_GRADIENT = "the gradient of {}"
_IN_STEP = "Let a layer do so, or give schedule='turns'"
_OF_NORMS = (
    "To clip gradients, give the Trainer gradient_clip_val, or call self.clip_gradients where the module optimizes "
    "manually; the callback GradientNorm logs the norm of all gradients"
)
_AVERAGES = (
    "For averages of weights, take the callback ExponentialMovingAverage, or keep them in a dict by name, made in "
    "on_train_start: each stage then has its own"
)

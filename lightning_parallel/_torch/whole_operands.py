"""Operations of user code that torch cannot do, or gets wrong, with parts of tensors: private names of torch."""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_parallel._torch import host_reads, unit_parameters, written_numbers

_TORCH = torch._C._disabled_torch_function_impl
_installed: list[Any] = []
"""The functions of runs that are set up, the innermost last."""
_SEEN = "_lightning_parallel_seen"
_LISTS = "_foreach_"
"""The beginning of the names of functions of lists of tensors."""
_NORMS = "_foreach_norm"
_LEFT = frozenset({"__get__", "__delete__", "backward", "grad", "equal", "detach", "requires_grad_"})
"""Functions that compute nothing with values, or that need the very tensors they are given, as do those whose names
begin with an underscore."""
_SHARING = frozenset({"__get__", "detach"})
"""Functions that return the same values, as does the attribute ``data``."""
_SET_TRAINED = Tensor.requires_grad.__set__  # type: ignore[attr-defined]
_GET_GRADIENT, _SET_GRADIENT = vars(torch._C.TensorBase)["grad"].__get__, vars(torch._C.TensorBase)["grad"].__set__
_TRANSPOSING = frozenset({"t_", "transpose_", "squeeze_", "unsqueeze_", "swapaxes_", "swapdims_", "resize_"})
_BY_PARTS = frozenset(
    {"abs", "clone", "isfinite", "max", "mean", "min", "mul", "norm", "pow", "square", "sum", "to", "vector_norm"}
    | {"__abs__", "__mul__", "__neg__", "__pow__", "__rmul__", "__truediv__", "zeros_like", "ones_like"}
)
"""Functions that torch gets right with parts that are cut along several axes of a mesh; views of these it does not."""
_CALLING = ("torch.functional", "torch.nn.functional", "torch.overrides", "torch._tensor", host_reads.__name__)
_KNOWING = ("lightning_parallel.", "torch.distributed.", "torch.optim.")
_CANNOT = (
    "mixed torch.Tensor and DTensor",
    "different mesh",
    "Cross device mesh",  # since 2.15, of what 2.13 calls different meshes
    "Sharding propagation failed",
    "sharding strategy",
    "in-place operations that require placement changes",
    "_StridedShard",
)
"""Words with which torch refuses an operation on DTensors, before it has done anything."""


@contextlib.contextmanager
def operands_made_whole(
    is_active: Callable[[], bool],
    whole: Callable[[DTensor], Tensor],
    part: Callable[[Tensor, DTensor], Tensor],
    tell_kept: Callable[[], None],
    tell_written: Callable[[str, written_numbers.Number], None],
) -> Iterator[None]:
    """Inside this context, what torch cannot compute with DTensors is computed with whole tensors.

    torch refuses to let a DTensor meet a plain tensor, and has no rule for some operations. A DTensor of a single value
    is taken for one that all ranks have, though each has a summand: the loss of this rank with a penalty on its part
    added would be reduced as if it were a sum over ranks. So single values become plain tensors at once.

    `DTensor.__torch_function__`, since 2.0, is torch's own that does nothing, `_disabled_torch_function_impl`. Another
    one is called for each function that is given a DTensor. There is no public hook. Views for autograd are known by
    `Tensor._base`, since 1.0, and made again by `Tensor._view_func_unsafe`, since 2.1.

    Args:
        is_active: Whether user code runs just now.
        whole: From a DTensor to its whole value as a plain tensor, in the graph of autograd. A collective.
        part: From a whole, plain tensor and a DTensor of its shape, to the former in the form of the latter.
        tell_kept: Called where user code asks for a gradient that is not reduced yet, and finds none.
        tell_written: Called where user code has written into a DTensor, with the function and the numbers it was given.
    """

    def called(cls: Any, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(function, "__name__", ""), kwargs or {}
        is_left = name in _LEFT or (name.startswith("_") and not name.startswith(("__", _LISTS)))
        if is_left or torch.compiler.is_compiling() or _is_internal(inspect.currentframe()) or not is_active():
            result = _left(function, name, args, kwargs)
        else:
            call = _Call(function, name, args, kwargs, whole, part)
            result = call.result()
            written_numbers.follow(function, args, kwargs, call.target, result, tell_written)
        # Through a reference from before the step, such as those in optimizers, while the gathered form is computed
        # with.
        if name == "requires_grad_" or function == _SET_TRAINED:
            unit_parameters.train_gathered(args[0])
        of_gradient = function in (_GET_GRADIENT, _SET_GRADIENT) and unit_parameters.keeps_gradient(args[0])
        if of_gradient and not _is_internal(frame := inspect.currentframe()) and not _moves(frame) and is_active():
            _meet_kept_gradient(*args, found=result, tell=tell_kept)
        return result

    _installed.append(classmethod(called))
    resume()
    try:
        yield
    finally:
        _installed.pop()
        resume()


def pause() -> None:
    """Leave DTensors to torch until `resume`: while backward runs, or an update begins, each look at one costs."""
    DTensor.__torch_function__ = _TORCH  # type: ignore[method-assign, assignment]


def resume() -> None:
    """Go on after `pause`."""
    DTensor.__torch_function__ = _installed[-1] if _installed else _TORCH  # type: ignore[method-assign, assignment]


def is_computing() -> bool:
    """Whether torch runs an operation of user code on DTensors just now, as it stands there."""
    return _nesting.depth > 0


class _Nesting(threading.local):
    depth = 0


_nesting = _Nesting()


@contextlib.contextmanager
def _computing() -> Iterator[None]:
    _nesting.depth += 1
    try:
        yield
    finally:
        _nesting.depth -= 1


def _plainly(function: Any, args: Any, kwargs: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():  # type: ignore[attr-defined]
        return function(*args, **kwargs)


def _left(function: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Leave a call to torch, and let the same values in another tensor carry what is known of them."""
    result = _plainly(function, args, kwargs)
    if name in _SHARING and args:
        written_numbers.share(args[0], result)
    return result


def _meet_kept_gradient(shard: Tensor, *given: Any, found: Any, tell: Callable[[], None]) -> None:
    """Drop a gradient that is not reduced yet where ``p.grad = None`` clears it, and say so where a look finds none."""
    if given[:1] == (None,) and found is None:
        unit_parameters.drop_gradient(shard)
    elif found is None:
        tell()


def _is_internal(own: FrameType | None) -> bool:
    """Whether the code that has called a function of torch, which calls `own`, knows of DTensors."""
    frame = own and own.f_back
    while frame is not None and (name := str(frame.f_globals.get("__name__", ""))).startswith(_CALLING):
        frame = frame.f_back
    return frame is not None and name.startswith(_KNOWING)


def _clips() -> bool:
    """Whether ``clip_grad_norm_``, which makes one of them, has asked for norms."""
    frame = inspect.currentframe()
    names = (str(frame.f_globals.get("__name__", "")) for frame in _callers(frame))
    return next((name for name in names if not name.startswith(("lightning_parallel.", "torch._"))), "").startswith(
        "torch.nn.utils"
    )


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _moves(own: FrameType | None) -> bool:
    """Whether ``module.to(...)``, which looks at each gradient, has called a function of torch, which calls `own`."""
    return own is not None and own.f_back is not None and own.f_back.f_code is nn.Module._apply.__code__


class _Call:
    """One call of a function of torch with DTensors."""

    def __init__(self, function: Any, name: str, args: Any, kwargs: Any, whole: Any, part: Any) -> None:
        self._function, self._name, self._args, self._kwargs = function, name, args, kwargs
        self._whole_of, self._part = whole, part
        self._sets_attribute, self._sets_items = name == "__set__", name == "__setitem__"
        in_place = self._sets_items or (name.startswith("__i") if name.endswith("__") else name.endswith("_"))
        self._out = kwargs.get("out")
        self.target = args[0] if args and in_place else self._out
        """The tensor that is written into; ``None`` where one is returned, or an attribute set."""

    def result(self) -> Any:
        if self._name.startswith(_LISTS):
            results = _plainly(self._function, self._args, self._kwargs)
            return [self._complete(each) for each in results] if self._name == _NORMS and not _clips() else results
        if self._sets_attribute:
            return _plainly(self._function, (self._args[0], *map(self._like_target, self._args[1:])), self._kwargs)
        if isinstance(self.target, DTensor) and (written := _written_by_view(self.target)) is not None:
            return self._write_view(written)
        if self._is_mixed():
            return self._with_whole_tensors()
        try:
            with _computing():
                result = _plainly(self._function, self._args, self._kwargs)
        except (RuntimeError, NotImplementedError) as error:
            # A tensor does not get another shape.
            if self._name in _TRANSPOSING or not any(words in str(error) for words in _CANNOT):
                raise
            return self._with_whole_tensors()
        # What a rank has of a value is a summand of it: norms of rows are not written into as such.
        is_summand = isinstance(result, DTensor) and any(each.is_partial() for each in result.placements)
        is_single = isinstance(result, DTensor) and (not result.ndim or is_summand) and self.target is None
        # A view without gradients, such as an element, may be written into.
        is_value = is_single and (result._base is None or torch.is_grad_enabled())
        return self._whole(result) if is_value else result

    def _is_mixed(self) -> bool:
        """Whether there are plain tensors; those without a dimension count only where they may be given a gradient.

        A write into items goes into a copy of them, where torch gathers them first, and is lost. Nor does torch do all
        things with parts along several axes.
        """
        values = [value for value in tree_leaves((self._args, self._kwargs)) if isinstance(value, Tensor)]
        if isinstance(self.target, DTensor) and (self._sets_items or self._out is not None):
            return True
        if self.target is None and self._name not in _BY_PARTS and any(map(_is_strided, values)):
            return True
        return any(
            not isinstance(value, DTensor) and (value.ndim or (torch.is_grad_enabled() and self.target is None))
            for value in values
        )

    def _with_whole_tensors(self) -> Any:
        made: list[Tensor] = []

        def noted(value: DTensor) -> Tensor:
            made.append(self._whole(value))
            return made[-1]

        args, kwargs = tree_map_only(DTensor, noted, (self._args, self._kwargs))
        result = self._function(*args, **kwargs)
        if isinstance(self.target, DTensor):
            self._write(self.target, args[0] if self._out is None else kwargs["out"])
            return self.target
        if not torch.is_grad_enabled() and _storages(result) & _storages(made):
            # What is written into a view has to reach the part.
            args, kwargs = tree_map_only(DTensor, _copy_for_views, (self._args, self._kwargs))
            return _plainly(self._function, args, kwargs)
        return result

    def _write_view(self, written: DTensor) -> Any:
        """Write into a view, of which torch has made a copy, and so into the tensor that is seen."""
        target: Any = self.target
        whole = self._whole(written).detach()
        view = whole if target._base is None else target._view_func_unsafe(whole)

        def replaced(value: DTensor) -> Tensor:
            return view if value is target else self._whole(value)

        args, kwargs = tree_map_only(DTensor, replaced, (self._args, self._kwargs))
        self._function(*args, **kwargs)
        self._write(written, whole)
        self._write(target, view)
        return target

    def _write(self, target: DTensor, whole: Tensor) -> None:
        _plainly(Tensor.copy_, (target, self._part(whole, target)), {})

    def _complete(self, norm: Tensor) -> Tensor:
        if isinstance(norm, DTensor) and any(each.is_partial() for each in norm.placements):
            return self._whole(norm)
        return norm

    def _whole(self, value: DTensor) -> Tensor:
        whole: Tensor = _plainly(self._whole_of, (value,), {})
        return whole

    def _like_target(self, value: Any) -> Any:
        """A gradient that is assigned, in the form of its parameter."""
        target = self._args[0]
        is_whole = isinstance(value, Tensor) and not isinstance(value, DTensor) and isinstance(target, DTensor)
        return _plainly(self._part, (value, target), {}) if is_whole and value.shape == target.shape else value


def _is_strided(value: Tensor) -> bool:
    """Whether `value` is sharded along an axis that tensor parallel has split already."""
    return isinstance(value, DTensor) and sum(not each.is_replicate() for each in value.placements) > 1


def _written_by_view(tensor: DTensor) -> DTensor | None:
    """The tensor of which `tensor` is a view for autograd, and a copy in memory; ``None`` for what is no such view.

    torch gathers a DTensor before it takes rows of it, and what is written into these is lost.
    """
    base = tensor._base
    seen = tensor if base is None else base
    if (origin := vars(seen).get(_SEEN)) is not None:
        return origin  # type: ignore[no-any-return]
    if not isinstance(base, DTensor) or _storages(base._local_tensor) == _storages(tensor._local_tensor):
        return None
    return base


def _copy_for_views(tensor: DTensor) -> DTensor:
    """The whole of `tensor` as a DTensor, writes into views of which are to reach `tensor`."""
    copy = _plainly(DTensor.redistribute, (tensor,), {"placements": [Replicate()] * tensor.device_mesh.ndim})
    vars(copy)[_SEEN] = tensor
    return copy  # type: ignore[no-any-return]


def _storages(values: Any) -> set[int]:
    return {value.untyped_storage().data_ptr() for value in tree_leaves(values) if isinstance(value, Tensor)}

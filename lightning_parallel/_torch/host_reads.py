"""Values of DTensors that reach the host, or come from there: private or version-dependent names of torch."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

_MISSING: Any = object()


@contextlib.contextmanager
def reads_intercepted(
    module: nn.Module,
    *,
    whole: Callable[[DTensor, str], Tensor],
    part: Callable[[Tensor, DTensor], Tensor],
    refuse: Callable[[str], NoReturn],
) -> Iterator[None]:
    """Inside this context, what code reads from a DTensor on the host comes from `whole`, and copies are refused.

    torch itself gives ``item()`` and ``float()`` of a DTensor the value of this rank's part, and pickles a shard. There
    is no public hook: `DTensor._op_dispatcher._custom_op_handlers`, since 2.1, has the handlers of single operations,
    in all supported versions; methods are set on the class, which inherits them from `Tensor`. Plain tensors and
    operations that stay on the device cost nothing more.

    Args:
        module: The module whose sharded units are not to be copied.
        whole: From a DTensor, and the name of what is done with it, to its whole value as a plain tensor on the host.
        part: From a whole, plain tensor and a DTensor of its shape, to the former in the form of the latter.
        refuse: Called with the name of a copy that cannot be made; it raises.
    """
    of_units = {
        "__deepcopy__": lambda self, memo: refuse("copy.deepcopy"),
        "__reduce_ex__": lambda self, protocol: refuse("torch.save, or pickle,"),
    }
    units = dict.fromkeys(type(unit) for unit in module.modules() if isinstance(unit, FSDPModule))
    with contextlib.ExitStack() as stack:
        stack.enter_context(_scalars_from(whole))
        stack.enter_context(_replaced(DTensor, {**_methods(whole, refuse), "copy_": _copying(part)}))
        for unit in units:
            stack.enter_context(_replaced(unit, of_units))
        yield


def _methods(whole: Callable[[DTensor, str], Tensor], refuse: Callable[[str], NoReturn]) -> dict[str, Any]:
    def copy_refused(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def copied(self: DTensor, *args: Any) -> Any:
            return plain(self, *args) if is_whole(self) else refuse(name)

        return copied

    def hook_refused(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def hooked(self: DTensor, hook: Any) -> Any:
            frame = inspect.currentframe()
            caller = str(frame.f_back.f_globals.get("__name__", "")) if frame and frame.f_back else ""
            is_of_user = caller.partition(".")[0] not in ("torch", "lightning_parallel")
            return refuse(name) if isinstance(self, nn.Parameter) and is_of_user else plain(self, hook)

        return hooked

    def represented(self: DTensor) -> str:
        return repr_of_torch(self) if is_whole(self) or is_traced(self) else _described(self)

    def formatted(self: DTensor, spec: str) -> str:
        return repr(self) if self.ndim else format(whole(self, "format").item(), spec)

    def numpy(self: DTensor, *args: Any, **kwargs: Any) -> Any:
        return whole(self, "numpy").requires_grad_(self.requires_grad).numpy(*args, **kwargs)

    def array(self: DTensor, *args: Any) -> Any:
        return whole(self, "numpy").requires_grad_(self.requires_grad).__array__(*args)

    repr_of_torch = DTensor.__repr__
    return {
        "__array__": array,
        "__deepcopy__": copy_refused("copy.deepcopy", Tensor.__deepcopy__),  # type: ignore[attr-defined]
        "__dlpack__": copy_refused("__dlpack__", Tensor.__dlpack__),
        "__format__": formatted,
        "__reduce_ex__": copy_refused("torch.save, or pickle,", Tensor.__reduce_ex__),
        "__repr__": represented,
        "numpy": numpy,
        "register_hook": hook_refused("register_hook", Tensor.register_hook),
        "register_post_accumulate_grad_hook": hook_refused(
            "register_post_accumulate_grad_hook", Tensor.register_post_accumulate_grad_hook
        ),
        "tolist": lambda self: whole(self, "tolist").tolist(),
    }


def _copying(part: Callable[[Tensor, DTensor], Tensor]) -> Callable[..., Any]:
    """``copy_`` that takes whole tensors, too: ``load_state_dict`` of a submodule copies them into parameters."""

    def copied(self: DTensor, source: Tensor, *args: Any, **kwargs: Any) -> Any:
        is_plain = type(source) in (Tensor, nn.Parameter) and source.ndim > 0
        if is_plain and source.shape == self.shape and not is_traced(self):
            source = part(source, self)
        return Tensor.copy_(self, source, *args, **kwargs)

    return copied


@contextlib.contextmanager
def _scalars_from(whole: Callable[[DTensor, str], Tensor]) -> Iterator[None]:
    """``item()``, and what is made of it: ``float()``, ``int()``, ``bool()``, ``torch.tensor([...])``."""

    def scalar(operation: Any, args: Any, kwargs: Any) -> Any:
        value = args[0]
        return operation(value.to_local() if is_traced(value) else whole(value, "item"))

    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    operation = torch.ops.aten._local_scalar_dense.default
    before = handlers.get(operation, _MISSING)
    handlers[operation] = scalar
    try:
        yield
    finally:
        handlers.pop(operation)
        if before is not _MISSING:
            handlers[operation] = before


@contextlib.contextmanager
def _replaced(cls: type, methods: dict[str, Any]) -> Iterator[None]:
    before = {name: vars(cls).get(name, _MISSING) for name in methods}
    for name, method in methods.items():
        setattr(cls, name, method)
    try:
        yield
    finally:
        for name, method in before.items():
            if method is _MISSING:
                delattr(cls, name)
            else:
                setattr(cls, name, method)


@contextlib.contextmanager
def data_of_shards_set() -> Iterator[None]:
    """Inside this context, ``parameter.data = values`` changes the values of a DTensor, as it does for a plain tensor.

    Values may be a DTensor like it, or the whole ones, as a plain tensor that is equal on all ranks.

    In all supported versions, torch replaces the data of the outer tensor, not of the local one, without an error: a
    teacher that averages weights in this way would never change. `DTensor.data` is inherited from `Tensor`; there is
    no public setter.
    """
    if "data" in vars(DTensor):  # replaced already, by an outer context
        yield
        return
    plain: Any = vars(torch._C.TensorBase)["data"]

    def set_data(self: Any, values: Any) -> None:
        is_alike = isinstance(values, DTensor) and values.shape == self.shape and values.dtype == self.dtype
        is_alike = is_alike and values.device == self.device and values.device_mesh == self.device_mesh
        is_whole = type(values) in (Tensor, nn.Parameter) and values.shape == self.shape and values.dtype == self.dtype
        if is_alike or (is_whole and values.ndim):
            with torch.no_grad():
                self.detach().copy_(values)
        else:
            plain.__set__(self, values)

    DTensor.data = property(plain.__get__, set_data)  # type: ignore[assignment]
    try:
        yield
    finally:
        del DTensor.data


def is_whole(tensor: DTensor) -> bool:
    """Whether this rank has all of `tensor`."""
    return all(placement.is_replicate() for placement in tensor.placements) or tensor.device_mesh.size() == 1


def is_traced(tensor: DTensor) -> bool:
    """Whether `tensor` stands for values that a compiled graph will have.

    `DTensor._local_tensor` and `torch._subclasses.FakeTensor`, since 2.0; no public spelling.
    """
    return torch.compiler.is_compiling() or isinstance(tensor._local_tensor, FakeTensor)


def _described(tensor: DTensor) -> str:
    """The repr of a shard without values, which nobody can take for those of the whole tensor. No collective."""
    gradient = ", requires_grad=True" if tensor.requires_grad else ""
    return (
        f"DTensor(shape={tuple(tensor.shape)}, dtype={tensor.dtype}{gradient}, placements={tensor.placements}; on this "
        "rank a part only, so no values are shown)"
    )


def sharing_ranks(tensor: DTensor) -> tuple[int, ...]:
    """The ranks of the process that must all read `tensor` for any of them to have its whole value.

    `DeviceMesh.mesh` and `get_coordinate`, since 2.2, both public.
    """
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    place = tuple(
        coordinate[dim] if placement.is_replicate() else slice(None) for dim, placement in enumerate(tensor.placements)
    )
    return tuple(tensor.device_mesh.mesh[place].flatten().tolist())


def default_store() -> dist.Store:
    """The store over which the processes found each other.

    `distributed_c10d._get_default_store`, since 1.7; no public spelling.
    """
    return dist.distributed_c10d._get_default_store()  # type: ignore[no-any-return]

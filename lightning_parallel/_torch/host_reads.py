"""Values of DTensors that reach the host, or come from there: private or version-dependent names of torch."""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from lightning_parallel._torch.written_numbers import note_source

_MISSING: Any = object()


@dataclass(frozen=True)
class Reader:
    """The functions that answer where code reads or copies a DTensor on the host.

    Args:
        whole: From a DTensor, and the name of what is done with it, to its whole value as a plain tensor on the host.
        refuse: Called with the name of a copy, or of a hook, that cannot be made; it raises.
        meet: Called before an operation of user code in which ranks wait for each other, with the mesh and the
            placements of a part and its form in words: it raises if other ranks do not come.
        is_asked: Whether a hook or a script runs an operation just now, and no step.
        announce: Called in place of `meet` before such an operation of a step, which may have run in the step before.
        draws_whole: Whether code draws just now whose numbers for a part are those of a whole tensor, on all ranks.
    """

    whole: Callable[[DTensor, str], Tensor]
    refuse: Callable[[str], NoReturn]
    meet: Callable[[DeviceMesh, Sequence[Placement], str], None]
    is_asked: Callable[[], bool]
    announce: Callable[[DeviceMesh, Sequence[Placement], str], None]
    draws_whole: Callable[[], bool]


_running: list[Reader] = []
"""Readers of the runs that are set up, the innermost last: they answer for all DTensors."""
_ended: dict[int, tuple[weakref.ref[DeviceMesh], Reader]] = {}
"""Readers of runs that have ended, by the `id` of a mesh: a hook may have kept a tensor, an error left a shard."""


@contextlib.contextmanager
def reads_intercepted(module: nn.Module, reader: Reader, part: Callable[[Tensor, DTensor], Tensor]) -> Iterator[None]:
    """Inside this context, what code reads from a DTensor on the host comes from `reader`, and copies are refused.

    Afterwards, this still holds for tensors on the meshes of `module`, which hooks may have kept.

    torch itself gives ``item()`` and ``float()`` of a DTensor the value of this rank's part, and pickles a shard. There
    is no public hook: `DTensor._op_dispatcher._custom_op_handlers`, since 2.1, has the handlers of single operations,
    in all supported versions; methods are set on the class, which inherits them from `Tensor`. Plain tensors and
    operations that stay on the device cost nothing more, and DTensors of others are what torch makes of them.

    Args:
        module: The module, whose sharded units are not to be copied.
        reader: Answers.
        part: From a whole, plain tensor and a DTensor of its shape, to the former in the form of the latter.
    """
    of_units = {
        "__deepcopy__": lambda self, memo: reader.refuse("copy.deepcopy"),
        "__reduce_ex__": lambda self, protocol: reader.refuse("torch.save, or pickle,"),
    }
    units = dict.fromkeys(type(unit) for unit in module.modules() if isinstance(unit, FSDPModule))
    meshes = [parameter.device_mesh for parameter in module.parameters() if isinstance(parameter, DTensor)]
    _ask_readers()
    with contextlib.ExitStack() as stack:
        stack.enter_context(_replaced(DTensor, {"copy_": _copying(part)}))
        for unit in units:
            stack.enter_context(_replaced(unit, of_units))
        _running.append(reader)
        try:
            yield
        finally:
            _running.remove(reader)
            _ended.update({id(mesh): (weakref.ref(mesh), reader) for mesh in meshes})


def reader_of(tensor: DTensor) -> Reader | None:
    """The reader that answers for `tensor`: none in a graph, nor for DTensors of others after a run."""
    return None if is_traced(tensor) else reader_on(tensor.device_mesh)


def reader_on(mesh: DeviceMesh) -> Reader | None:
    """The reader that answers for tensors on `mesh`: none for those of others after a run."""
    if _running:
        return _running[-1]
    known, reader = _ended.get(id(mesh), (None, None))
    return reader if known is not None and known() is mesh else None


@functools.cache
def _ask_readers() -> None:
    """Let DTensors ask their readers, once and for good."""
    for name, method in _methods().items():
        setattr(DTensor, name, method)
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    operation = torch.ops.aten._local_scalar_dense.default

    def scalar(operation: Any, args: Any, kwargs: Any) -> Any:
        """``item()``, and what is made of it: ``float()``, ``int()``, ``bool()``, ``torch.tensor([...])``."""
        reader = reader_of(args[0])
        return operation(args[0].to_local() if reader is None else reader.whole(args[0], "item"))

    handlers[operation] = scalar


def _methods() -> dict[str, Any]:
    """Methods of DTensors that ask their reader, if they have one."""

    def represented(self: DTensor) -> str:
        return repr_of_torch(self) if reader_of(self) is None or is_whole(self) else _described(self)

    def formatted(self: DTensor, spec: str) -> str:
        reader = reader_of(self)
        if reader is None:
            return Tensor.__format__(self, spec)  # type: ignore[no-untyped-call, no-any-return]
        return repr(self) if self.ndim else format(reader.whole(self, "format").item(), spec)

    repr_of_torch = DTensor.__repr__
    register_later = "register_post_accumulate_grad_hook"
    return {
        "__array__": _read("numpy", Tensor.__array__),
        "__deepcopy__": _deep_copied,
        "__dlpack__": _copied("__dlpack__", Tensor.__dlpack__),
        "__format__": formatted,
        "__reduce_ex__": _copied("torch.save, or pickle,", Tensor.__reduce_ex__),
        "__repr__": represented,
        "numpy": _read("numpy", Tensor.numpy),
        "register_hook": _hooked("register_hook", Tensor.register_hook),
        register_later: _hooked(register_later, Tensor.register_post_accumulate_grad_hook),
        "tolist": _read("tolist", Tensor.tolist),
    }


def _read(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    """The method `plain`, of the whole value."""

    def read(self: DTensor, *args: Any, **kwargs: Any) -> Any:
        reader = reader_of(self)
        value = self if reader is None else reader.whole(self, name).requires_grad_(self.requires_grad)
        return plain(value, *args, **kwargs)

    return read


def _copied(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    """The method `plain`, refused for a part."""

    def copied(self: DTensor, *args: Any) -> Any:
        reader = reader_of(self)
        return plain(self, *args) if reader is None or is_whole(self) else reader.refuse(name)

    return copied


def _deep_copied(self: DTensor, memo: dict[int, Any]) -> DTensor:
    """A part of a value, such as those in a `state_dict`, of its own, as `clone` gives one; refused for a parameter."""
    reader = reader_of(self)
    if reader is None or is_whole(self):
        return Tensor.__deepcopy__(self, memo)  # type: ignore[attr-defined, no-any-return]
    is_value = not (isinstance(self, nn.Parameter) or self.requires_grad)
    return self.clone() if is_value else reader.refuse("copy.deepcopy")  # type: ignore[return-value]


def _hooked(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    """The method `plain`, refused where a user calls it on a parameter while a run is set up."""

    def hooked(self: DTensor, hook: Any) -> Any:
        frame = inspect.currentframe()
        caller = str(frame.f_back.f_globals.get("__name__", "")) if frame and frame.f_back else ""
        is_of_user = caller.partition(".")[0] not in ("torch", "lightning_parallel")
        is_refused = _running and isinstance(self, nn.Parameter) and is_of_user
        return _running[-1].refuse(name) if is_refused else plain(self, hook)

    return hooked


def _copying(part: Callable[[Tensor, DTensor], Tensor]) -> Callable[..., Any]:
    """``copy_`` that takes whole tensors, too: ``load_state_dict`` of a submodule copies them into parameters."""

    def copied(self: DTensor, source: Tensor, *args: Any, **kwargs: Any) -> Any:
        is_plain = type(source) in (Tensor, nn.Parameter) and source.ndim > 0
        if is_plain and source.shape == self.shape and not is_traced(self):
            source, whole = part(source, self), source
            note_source(source, whole)
        return Tensor.copy_(self, source, *args, **kwargs)

    return copied


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
            vars(Tensor).get("data", plain).__set__(self, values)

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


def sharing_ranks(mesh: DeviceMesh, placements: Sequence[Placement]) -> tuple[int, ...]:
    """The ranks of the process that must all read a tensor for any of them to have its whole value.

    `DeviceMesh.mesh` and `get_coordinate`, since 2.2, both public.

    Args:
        mesh: The mesh of the tensor.
        placements: Its parts.
    """
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    place = tuple(
        coordinate[dim] if placement.is_replicate() else slice(None) for dim, placement in enumerate(placements)
    )
    return tuple(mesh.mesh[place].flatten().tolist())


def default_store() -> dist.Store:
    """The store over which the processes found each other.

    `distributed_c10d._get_default_store`, since 1.7; no public spelling.
    """
    return dist.distributed_c10d._get_default_store()  # type: ignore[no-any-return]

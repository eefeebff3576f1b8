"""Operations on parts of DTensors for which ranks wait, or that draw: private or version-dependent names of torch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, _dispatch, _redistribute
from torch.utils._pytree import tree_map_only

from lightning_parallel._torch.host_reads import is_whole, reader_of, reader_on
from lightning_parallel._torch.mixed_lists import as_torch_has_it, take_mixed_lists
from lightning_parallel._torch.tensors import operations
from lightning_parallel._torch.whole_operands import is_computing

Handler = Callable[[Any, Any, Any], Any]
_GATHERING = operations("argmax", "argmin", "max", "min")
"""Operations that have handlers of torch's own, in which ranks wait for each other; which do depends on the version."""
_FILLING = operations("normal_", "uniform_", "bernoulli_", "random_", "exponential_", "log_normal_", "cauchy_")
_DRAWING = _FILLING | operations("rand_like", "randn_like", "randint_like", "bernoulli", "native_dropout")
_OF_VALUES = operations("bernoulli", "native_dropout")


@functools.cache
def ask_readers(part: Callable[..., Tensor]) -> None:
    """Let operations in which ranks wait for each other, and those that draw, ask readers of DTensors; once for good.

    What layers do in a step stays as torch has it, and so do DTensors without a reader.

    `redistribute_local_tensor` of `torch.distributed.tensor._redistribute`, since 2.1, is called wherever an operation,
    a gather or its backward needs the parts of other ranks; `_op_dispatcher._custom_op_handlers`, since 2.1, has the
    handlers of single operations. In all supported versions there is no public hook.

    Args:
        part: From a whole, plain tensor, a DTensor and the placements to this rank's part of it.
    """
    plain = _redistribute.redistribute_local_tensor

    @functools.wraps(plain)
    def redistributed(local_tensor: Tensor, current_spec: Any, target_spec: Any, **options: Any) -> Tensor:
        if current_spec.mesh != target_spec.mesh:
            return plain(local_tensor, current_spec, target_spec, **options)  # which refuses it
        pairs = zip(current_spec.placements, target_spec.placements, strict=True)
        if any(now != then and not now.is_replicate() for now, then in pairs):
            _meet(local_tensor, current_spec.mesh, current_spec.placements, current_spec.shape)
        return plain(local_tensor, current_spec, target_spec, **options)

    for module in (_redistribute, _dispatch):
        module.redistribute_local_tensor = redistributed  # type: ignore[attr-defined]
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    handlers[torch.ops.aten.equal.default] = _equal
    handlers.update({operation: _gathering(handlers[operation]) for operation in _GATHERING & handlers.keys()})
    drawing = {operation for operation in _DRAWING if not any(each.is_out for each in operation._schema.arguments)}
    handlers.update(dict.fromkeys(drawing, functools.partial(_drawn, part)))
    handlers[torch.ops.aten.cat.default] = _joined
    handlers[torch.ops.aten._is_any_true.default] = _any_here
    take_mixed_lists()


def _meet(local: Tensor, mesh: DeviceMesh, placements: Any, shape: Any) -> None:
    if torch.compiler.is_compiling() or isinstance(local, FakeTensor):
        return
    reader = reader_on(mesh)
    if reader is not None and reader.is_asked():
        reader.meet(mesh, placements, f"{tuple(shape)} {local.dtype}")
    elif reader is not None and is_computing():
        reader.announce(mesh, placements, f"{tuple(shape)} {local.dtype}")


def _equal(operation: Any, args: Any, kwargs: Any) -> Any:
    """`torch.equal` of whole values: torch itself asks all ranks of the process, whoever has a part."""
    parts = [value for value in args if isinstance(value, DTensor)]
    reader = reader_of(parts[0])
    if reader is None or (len(parts) == 2 and all(map(is_whole, parts))):
        return as_torch_has_it(operation, args, kwargs)
    if args[0].shape != args[1].shape:
        return False  # as for plain tensors, and on all ranks alike
    # One may be no DTensor: Lightning's fine-tuning callbacks look for a parameter among all that an optimizer has.
    one, other = (reader.whole(each, "torch.equal") if isinstance(each, DTensor) else each.cpu() for each in args)
    return torch.equal(one, other)


def _any_here(operation: Any, args: Any, kwargs: Any) -> Any:
    """Whether anything is true in this rank's part, which `torch.autograd.detect_anomaly` asks of each gradient."""
    tensor: DTensor = args[0]
    return operation(tensor._local_tensor, *args[1:], **kwargs)


def _joined(operation: Any, args: Any, kwargs: Any) -> Any:
    """`torch.cat` in a hook, of parameters or gradients of which only some are DTensors, or lie on several meshes.

    `torch.nn.utils.parameters_to_vector` does it, as does code that takes the norm of all gradients at once.
    """
    meshes = {tensor.device_mesh if isinstance(tensor, DTensor) else None for tensor in args[0]}
    reader = next((reader_of(tensor) for tensor in args[0] if isinstance(tensor, DTensor)), None)
    if len(meshes) == 1 or reader is None or not reader.is_asked():
        return as_torch_has_it(operation, args, kwargs)
    whole = [
        reader.whole(tensor, "torch.cat").to(tensor.device) if isinstance(tensor, DTensor) else tensor
        for tensor in args[0]
    ]
    return operation(whole, *args[1:], **kwargs)


def _gathering(handler: Handler) -> Handler:
    def gathered(operation: Any, args: Any, kwargs: Any) -> Any:
        tensor: DTensor = args[0]
        if not is_whole(tensor):
            _meet(tensor._local_tensor, tensor.device_mesh, tensor.placements, tensor.shape)
        return handler(operation, args, kwargs)

    return gathered


def _drawn(part: Callable[..., Tensor], operation: Any, args: Any, kwargs: Any) -> Any:
    """Numbers for the whole of a tensor, of which this rank keeps its part, where all ranks draw from one stream.

    On the CPU, torch draws for each part from the beginning of the stream: alike on all ranks.
    """
    tensor: DTensor = args[0]
    reader = reader_of(tensor)
    if reader is None or is_whole(tensor) or tensor.device.type != "cpu" or not reader.draws_whole():
        return as_torch_has_it(operation, args, kwargs)
    name = operation.overloadpacket.__name__
    others = tree_map_only(DTensor, lambda value: reader.whole(value, name), args[1:])
    is_of_values = operation in _OF_VALUES
    source = reader.whole(tensor, name) if is_of_values else torch.empty(tensor.shape, dtype=tensor.dtype)
    drawn = operation(source, *others, **kwargs)
    placements = [Replicate() if placement.is_partial() else placement for placement in tensor.placements]
    parts = tree_map_only(Tensor, lambda value: part(value, tensor, placements), drawn)
    if operation not in _FILLING:
        return parts
    tensor._local_tensor.copy_(parts._local_tensor)
    return tensor

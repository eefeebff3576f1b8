"""Every private or version-dependent name of torch that the package touches. Layer 0.

Each function says since which version the name exists and which public call would replace it. Nothing else in the
package may import a name of torch that begins with an underscore (a test enforces it).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule


def flattened(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """A mesh of one axis `name` in place of all axes of `mesh`.

    `DeviceMesh._flatten`, since 2.4; waits for a public spelling.
    """
    return mesh._flatten(name)


def broadcast_tensors(tensors: Sequence[Tensor], *, source: int, bucket_bytes: int = 2**26) -> None:
    """Broadcast many tensors from rank `source` of the default group, a bucket a collective.

    `torch.distributed._broadcast_coalesced`, since 1.0; what DDP itself uses, no public spelling.
    """
    if tensors:
        group = dist.distributed_c10d._get_default_group()
        dist._broadcast_coalesced(group, list(tensors), bucket_bytes, source)  # type: ignore[attr-defined]


def initialize_sharding(root: nn.Module) -> None:
    """Make `root` the root of the sharded units below it, now and not in the first forward.

    Whichever unit runs first becomes a root otherwise, and a layer that a hook calls before the first step would be
    it. `FSDPState._lazy_init`, since 2.4; no public spelling.
    """
    assert isinstance(root, FSDPModule)
    root._get_fsdp_state()._lazy_init()


def drop_forward_hooks(unit: nn.Module) -> None:
    """Take off the hooks with which `unit` gathers its parameters around `forward`.

    Where a method around `forward` gathers them already (`gather_around`), the hooks of the inner call would free
    them, and backward would gather them once more. `FSDPState._pre_forward_hook_handle`, since 2.4.
    """
    assert isinstance(unit, FSDPModule)
    state = unit._get_fsdp_state()
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()


def abandon_step(unit: nn.Module) -> None:
    """Bring a unit whose step ended in an error back to its shards.

    `FSDPModule.reset_iter_state` (public) does so since 2.13, but only from a root; `FSDPState._training_state`, since
    2.4, serves all versions and units.
    """
    if isinstance(unit, FSDPModule):
        state = unit._get_fsdp_state()
        idle = type(state._training_state).IDLE
        state._training_state = idle
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        for group in groups:
            if group is not None:
                group._training_state = idle
        unit.reshard()


def forget_sharding(module: nn.Module) -> None:
    """Drop torch's note that `module` is sharded, so that it can be sharded again.

    `torch.distributed._composable_state`, since 2.0; waits for an inverse of `fully_shard`.
    """
    from torch.distributed import _composable_state

    _composable_state._module_state_mapping.pop(module, None)


def gather_around(holder: nn.Module, method: str, unit: nn.Module) -> None:
    """While ``holder.method`` runs, the parameters of `unit` are gathered.

    `register_fsdp_forward_method` (public) does this for a method that nobody calls from within `forward`; ours may
    be: a nested call must not free the parameters under its caller. `FSDPState._pre_forward`, since 2.4.
    """
    assert isinstance(unit, FSDPModule)
    original = getattr(holder, method)
    state = unit._get_fsdp_state()
    idle = type(state._training_state).IDLE

    @functools.wraps(original)
    def gathered(*args: Any, **kwargs: Any) -> Any:
        if state._training_state != idle:
            return original(*args, **kwargs)
        args, kwargs = state._pre_forward(unit, args, kwargs)
        versions = [gathered._version for _, gathered in gathered_parameters(unit)]
        result = original(*args, **kwargs)
        changed = [g._version for _, g in gathered_parameters(unit)] != versions
        result = state._post_forward(unit, args, result)
        if changed:
            raise RuntimeError(
                f"{method} writes into parameters while they are gathered, and the change would be lost. Write in a "
                "hook, such as on_train_batch_end, where parameters are their shards, or use zero1_custom"
            )
        return result

    setattr(holder, method, gathered)


def reduce_unused_parameters(unit: nn.Module) -> bool:
    """Let ranks that did not use a parameter of `unit` in a step take part in its reduction, with zeros.

    `FSDPModule.set_reduce_scatter_unused_params`, since 2.13; before, such a step hangs and there is nothing to set.
    Returns whether there is.
    """
    if not isinstance(unit, FSDPModule) or not hasattr(unit, "set_reduce_scatter_unused_params"):
        return False
    unit.set_reduce_scatter_unused_params(True, recurse=False)
    return True


def gathered_parameters(unit: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of a parameter's shard and its gathered form, for those of `unit` that were gathered before.

    `FSDPState._fsdp_param_groups`, since 2.13, and `_fsdp_param_group` before; no public spelling.
    """
    assert isinstance(unit, FSDPModule)
    state = unit._get_fsdp_state()
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    for group in groups:
        for parameter in group.fsdp_params if group is not None else ():
            if hasattr(parameter, "_unsharded_param"):
                yield parameter.sharded_param, parameter._unsharded_param


def after_backward(tensor: Tensor, action: Any) -> None:
    """Run `action` once at the end of the backward pass that goes through `tensor`.

    The autograd engine's `queue_callback`, since 1.0; what DDP and FSDP themselves use, no public spelling.
    """
    from torch.autograd import Variable

    def queue(gradient: Tensor) -> None:
        Variable._execution_engine.queue_callback(action)

    tensor.register_hook(queue)


@contextlib.contextmanager
def initializer_replaced(replace: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """While this is open, `torch.nn.init.trunc_normal_` samples by ``replace(its own sampling)``.

    Since 2.13 it samples by rejection, in a loop that looks at the values: not recordable operation by operation.
    `torch.nn.init._no_grad_trunc_normal_`, since 1.3; there is no public way to note an initialisation.
    """
    original = nn.init._no_grad_trunc_normal_
    nn.init._no_grad_trunc_normal_ = replace(original)
    try:
        yield
    finally:
        nn.init._no_grad_trunc_normal_ = original


def without_function_modes() -> contextlib.AbstractContextManager[None]:
    """Switch off `TorchFunctionMode`s, for code that is called by one. `torch._C.DisableTorchFunction`, since 1.13."""
    return torch._C.DisableTorchFunction()  # type: ignore[no-any-return]


HOOK_TABLES = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_pre_hooks",
    "_backward_hooks",
    "_state_dict_pre_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
"""Where `nn.Module` keeps its hooks: names stable since 2.0; there is no public way to list a module's hooks."""

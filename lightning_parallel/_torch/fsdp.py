"""FSDP2 and DTensors: private or version-dependent names of torch."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor

from lightning_parallel._torch.unit_parameters import gathered_of, parameter_groups

_WIDENS_APART = not isinstance(vars(FSDPParam).get("unsharded_accumulated_grad"), property)
"""Whether unreduced gradients are summed, in the reduce dtype, in a tensor of their own.

That tensor is `FSDPParam.unsharded_accumulated_grad`. Since 2.15 the gathered parameter's own `grad` has the reduce
dtype and keeps the sum, and the old name only reads it. `FSDPParam`, since 2.4, in this place since 2.6; no public
spelling.
"""


def initialize_sharding(root: nn.Module) -> None:
    """Make `root` the root of the sharded units below it, now instead of in the first forward.

    Otherwise the unit that runs first becomes the root, even if it is a layer that a hook calls before the first step.
    `FSDPState._lazy_init`, since 2.4; no public spelling.
    """
    assert isinstance(root, FSDPModule)
    root._get_fsdp_state()._lazy_init()


def drop_forward_hooks(unit: nn.Module) -> None:
    """Remove the hooks with which `unit` gathers its parameters around `forward`.

    Where a method around `forward` has gathered the parameters already (`gather_around`), the hooks of the inner call
    would free them too early, and backward would gather them again. `FSDPState._pre_forward_hook_handle`, since 2.4.
    """
    assert isinstance(unit, FSDPModule)
    state = unit._get_fsdp_state()
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()


def leave_forward(unit: nn.Module) -> None:
    """Bring a unit whose forward ended in an error, or is followed by no backward, back to its shards.

    `FSDPModule.reset_iter_state` (public) does so since 2.13, but only from a root, and since 2.15 it drops reduced
    gradients, too; `FSDPState._training_state` and `_state_ctx`, since 2.4, serve all versions and units.
    """
    if isinstance(unit, FSDPModule):
        _make_idle(unit)
        context = unit._get_fsdp_state()._state_ctx
        # A backward that fails leaves its final callback queued, and no later one would reduce the root's gradients.
        context.post_backward_final_callback_queued = False
        context.iter_forward_root = None
        for group in parameter_groups(unit):
            group._post_forward_indices.clear()
        for record in gathered_of(unit):
            if record.is_gathered:
                record.take_back_memory()
        unit.reshard()


def abandon_step(unit: nn.Module) -> None:
    """Bring a unit whose step ended in an error back to its shards, and drop its unreduced gradients."""
    leave_forward(unit)
    if isinstance(unit, FSDPModule):
        for group in parameter_groups(unit):
            _drop_held(group, group.fsdp_params)


def drop_held_gradients(unit: nn.Module, parameters: Collection[Tensor]) -> None:
    """Drop gradients that `unit` holds unreduced, or reduced but not yet averaged over copies (HSDP).

    `FSDPParam._unsharded_param` and `FSDPParamGroup._partial_reduce_output`, since 2.4.

    Args:
        unit: A sharded unit.
        parameters: Shards of the parameters whose gradients are dropped.
    """
    assert isinstance(unit, FSDPModule)
    for group in parameter_groups(unit):
        _drop_held(group, [parameter for parameter in group.fsdp_params if parameter.sharded_param in parameters])


def _drop_held(group: Any, parameters: Sequence[Any]) -> None:
    # One buffer holds the reduced gradients of the whole group, so it can only be dropped for all of them.
    if len(parameters) == len(group.fsdp_params):
        group._partial_reduce_output = None
    for parameter in parameters:
        if _WIDENS_APART:
            parameter.unsharded_accumulated_grad = None
        if hasattr(parameter, "_unsharded_param"):
            parameter._unsharded_param.grad = None


def _waiting_gradient(parameter: Any) -> Tensor | None:
    """Return the unreduced sum of the whole gradients of an `FSDPParam`, if there is any."""
    apart = parameter.unsharded_accumulated_grad if _WIDENS_APART else None
    if apart is None and hasattr(parameter, "_unsharded_param"):
        apart = parameter._unsharded_param.grad
    return apart  # type: ignore[no-any-return]


def can_hold_gradients(unit: nn.Module) -> bool:
    """Whether torch can hold gradients of `unit` unreduced: before 2.15, a unit that widens them must have run once.

    `FSDPParam.reduce_dtype` and `_unsharded_param`, since 2.4.
    """
    assert isinstance(unit, FSDPModule)
    if not _WIDENS_APART:
        return True
    return all(
        parameter.reduce_dtype is None or hasattr(parameter, "_unsharded_param")
        for group in parameter_groups(unit)
        for parameter in group.fsdp_params
    )


def holds_gradients(unit: nn.Module) -> bool:
    """Whether `unit` has gradients on this rank that are not reduced yet, or reduced but not averaged.

    `FSDPParam._unsharded_param` and `FSDPParamGroup._partial_reduce_output`, since 2.4.
    """
    assert isinstance(unit, FSDPModule)
    return any(
        group._partial_reduce_output is not None
        or any(_waiting_gradient(parameter) is not None for parameter in group.fsdp_params)
        for group in parameter_groups(unit)
    )


def even_out_held_gradients(unit: nn.Module) -> None:
    """Give all gradients that `unit` holds unreduced one dtype, with zeros for parameters that were not used so far.

    Held gradients are widened to the reduce dtype, and `foreach_reduce` takes one dtype only: a parameter that only
    the last microstep uses would add one of another dtype. `FSDPParam.unsharded_accumulated_grad`, since 2.4; since
    2.15 gradients of several dtypes are reduced together, and there is nothing to do.
    """
    assert isinstance(unit, FSDPModule)
    for group in parameter_groups(unit) if _WIDENS_APART else ():
        if any(parameter.unsharded_accumulated_grad is not None for parameter in group.fsdp_params):
            for parameter in group.fsdp_params:
                whole = parameter._unsharded_param
                if parameter.unsharded_accumulated_grad is None and whole.requires_grad and whole.grad is None:
                    dtype = parameter.reduce_dtype or whole.dtype
                    parameter.unsharded_accumulated_grad = torch.zeros_like(whole, dtype=dtype)


def reduce_held_gradients(unit: nn.Module) -> None:
    """Reduce the gradients that `unit` holds unreduced, outside of any backward. A collective.

    `FSDPParamGroup.post_backward`, since 2.4, does this within a backward. No public call serves here: the one of 2.15,
    `FSDPModule.finalize_backward`, expects a root that never reduces in a backward, and no averaging over copies.
    """
    assert isinstance(unit, FSDPModule)
    for group in parameter_groups(unit):
        for parameter in group.fsdp_params:
            # The gathered form remembers whether the parameter was trainable when it was last gathered; the user may
            # have frozen or thawed it since.
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.requires_grad_(parameter.sharded_param.requires_grad)
        group.post_backward()
        # Since 2.15, `finalize_backward` leaves waiting to the unit's root, which does not run here.
        group._wait_for_post_backward()
        group.finalize_backward()
    _make_idle(unit)


def whole_gradient_bytes(unit: nn.Module) -> int:
    """Bytes of the whole gradients of `unit` before they are reduced, in the dtype in which they are held.

    `FSDPParam.reduce_dtype` and `_orig_size`, since 2.4; `unsharded_grad_dtype`, since 2.15.
    """
    assert isinstance(unit, FSDPModule)
    total = 0
    for group in parameter_groups(unit):
        for parameter in group.fsdp_params:
            if parameter.sharded_param.requires_grad:
                waits_in = parameter.param_dtype if _WIDENS_APART else parameter.unsharded_grad_dtype
                dtype = parameter.reduce_dtype or waits_in or parameter.orig_dtype
                total += parameter._orig_size.numel() * dtype.itemsize
    return total


def _make_idle(unit: FSDPModule) -> None:
    state = unit._get_fsdp_state()
    idle = type(state._training_state).IDLE
    for part in (state, *parameter_groups(unit)):
        part._training_state = idle


def forget_sharding(module: nn.Module) -> None:
    """Drop torch's note that `module` is sharded, so that it can be sharded again.

    `torch.distributed._composable_state`, since 2.0; waits for an inverse of `fully_shard`.
    """
    from torch.distributed import _composable_state

    _composable_state._module_state_mapping.pop(module, None)


def leave_where_it_is(holder: nn.Module) -> None:
    """Let ``holder.to(device)``, ``holder.float()`` and the like do nothing where they would change no tensor of it.

    torch brings a sharded unit back to its shards first, in the middle of a step, too, and swaps each of them.
    `Module._apply`, since 0.1; no public spelling.
    """
    original = holder._apply

    @functools.wraps(original)
    def applied(fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> nn.Module:
        with torch.no_grad():
            is_idle = all(fn(tensor) is tensor for tensor in itertools.chain(holder.parameters(), holder.buffers()))
        return holder if is_idle else original(fn, *args, **kwargs)

    vars(holder)["_apply"] = applied


CAN_REDUCE_UNUSED = hasattr(FSDPModule, "set_reduce_scatter_unused_params")
"""Whether torch itself reduces zeros in the place of missing gradients: since 2.13."""


def reduce_unused_parameters(unit: FSDPModule) -> None:
    """Let ranks that did not use a parameter of `unit` in a step take part in its reduction, with zeros.

    `FSDPModule.set_reduce_scatter_unused_params`, since 2.13. Before, nothing can be set, and such a step would hang:
    `FSDPParamGroup.post_backward`, since 2.4, finds zeros.
    """
    if CAN_REDUCE_UNUSED:
        unit.set_reduce_scatter_unused_params(True, recurse=False)
    else:
        for group in parameter_groups(unit):
            if "post_backward" not in vars(group):
                group.post_backward = functools.partial(_reduce_with_zeros, group, group.post_backward)


def _reduce_with_zeros(group: Any, post_backward: Callable[..., None], *args: Any) -> None:
    """Reduce the gradients of a group, with zeros of the dtype of the others for parameters that have none."""
    gathered = [parameter for parameter in group.fsdp_params if hasattr(parameter, "_unsharded_param")]
    waits = any(parameter.unsharded_accumulated_grad is not None for parameter in gathered)
    for parameter in gathered if group.reduce_grads else ():
        whole = parameter._unsharded_param
        if whole.requires_grad and whole.grad is None and parameter.unsharded_accumulated_grad is None:
            if waits:
                dtype = parameter.reduce_dtype or whole.dtype
                parameter.unsharded_accumulated_grad = torch.zeros_like(whole, dtype=dtype)
            else:
                whole.grad = torch.zeros_like(whole)
    post_backward(*args)


@contextlib.contextmanager
def unscaling_shards(scaler: torch.amp.GradScaler) -> Iterator[None]:
    """Inside this context, `scaler` unscales sharded and whole gradients together, and all ranks skip the same steps.

    The scaler's own `_unscale_grads_`, since 1.6, passes both kinds to one operation, which takes no mixture of tensors
    and DTensors.
    """

    def unscale(optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool) -> dict[torch.device, Tensor]:
        by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for grad in (p.grad for each in optimizer.param_groups for p in each["params"] if p.grad is not None):
            if grad.dtype == torch.float16 and not allow_fp16:
                raise ValueError("Attempting to unscale FP16 gradients.")
            local = grad.to_local() if isinstance(grad, DTensor) else grad
            by_kind.setdefault((local.device, local.dtype), []).append(local)
        found = {device: found_inf.to(device, copy=True) for device, _ in by_kind}
        for (device, _), gradients in by_kind.items():
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, found[device], inv_scale.to(device))
        agreed = torch.stack([each.to(found_inf.device) for each in found.values()]).amax(0) if found else found_inf
        # An overflow on one rank has to skip the step on all of them, else their parameters would drift apart.
        if dist.is_initialized():
            dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
        return {device: agreed.to(device) for device in found} or {found_inf.device: agreed}

    scaler._unscale_grads_ = unscale  # type: ignore[method-assign]
    try:
        yield
    finally:
        del scaler._unscale_grads_

"""Every private or version-dependent name of torch that the package touches. Layer 0.

Each function says since which version the name exists and which public call would replace it. Nothing else in the
package may import a name of torch that begins with an underscore (a test enforces it).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


def flattened(mesh: DeviceMesh, name: str, *, backend: str | None = None) -> DeviceMesh:
    """A mesh of one axis `name` in place of all axes of `mesh`; with `backend`, always in a group of its own.

    `DeviceMesh._flatten`, since 2.4; waits for a public spelling.
    """
    return mesh._flatten(name, backend)


def concatenated(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """A mesh of the axes of several meshes of the same ranks, of which some may be flattened.

    `DeviceMesh._concatenate`, since 2.10; waits for a public spelling.
    """
    return DeviceMesh._concatenate(list(meshes))


@contextlib.contextmanager
def gloo_of_one_thread() -> Iterator[None]:
    """In here, groups that are made for gloo have one thread each, where torch gives them two.

    Either thread writes the name of the collective that it has finished into one string of the group, under no lock.
    Names of more than 15 characters, such as that of the gathers of DTensors, are on the heap, and two writes at once
    break it: the process ends some time later, anywhere. So in 2.11, 2.13 and 2.14; `tests/stress_gloo.py` shows it.
    Not for the group of the process, in which DDP runs: the names of its collectives are short, and its PowerSGD waits
    for one collective in the thread that has ended another, which one thread alone would do for ever.
    `ProcessGroupGloo._Options`, in all versions of the window; waits for a lock there, or for `pg_options` of gloo.
    """
    if not dist.is_gloo_available():
        yield
        return
    of_torch: Any = dist.distributed_c10d.ProcessGroupGloo

    class OfOneThread(of_torch):  # type: ignore[misc]
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, **settings: Any) -> None:
            options = of_torch._Options()
            options._timeout, options._threads = timeout, 1
            for name, value in settings.items():  # `enable_reconfigure`, since 2.14
                setattr(options, name, value)
            interfaces = os.environ.get("GLOO_SOCKET_IFNAME")
            options._devices = (
                [of_torch.create_device(interface=each) for each in interfaces.split(",")]
                if interfaces
                else [of_torch.create_default_device()]
            )
            super().__init__(store, rank, size, options)

    dist.distributed_c10d.ProcessGroupGloo = OfOneThread  # type: ignore[misc]
    try:
        yield
    finally:
        dist.distributed_c10d.ProcessGroupGloo = of_torch  # type: ignore[misc]


def set_timeout(group: Any, timeout: timedelta) -> None:
    """Let collectives of `group` wait so long for a missing rank: groups of a mesh cannot be made with a timeout.

    `torch.distributed.distributed_c10d._set_pg_timeout`, since 2.2; waits for a `timeout` of `init_device_mesh`.
    """
    dist.distributed_c10d._set_pg_timeout(timeout, group)


def broadcast_tensors(tensors: Sequence[Tensor], *, source: int, group: Any = None, bucket_bytes: int = 2**26) -> None:
    """Broadcast many tensors from rank `source` of `group`, by default of all ranks, a bucket a collective.

    `torch.distributed._broadcast_coalesced`, since 1.0; what DDP itself uses, no public spelling.
    """
    if tensors:
        group = group or dist.distributed_c10d._get_default_group()
        dist._broadcast_coalesced(group, list(tensors), bucket_bytes, source)  # type: ignore[attr-defined]


def reduce_scatter(part: Tensor, whole: Tensor, group: Any) -> None:
    """Add up `whole` over the ranks, and put this rank's equal part along the first dimension into `part`.

    `torch.distributed.reduce_scatter_single`, since 2.13, where `reduce_scatter_tensor` warns.
    """
    collective = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    collective(part, whole, group=group)


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


@contextlib.contextmanager
def outside_of(mode: Any) -> Iterator[None]:
    """In here, `mode` is not entered, if it was the last one to be: compilers would trace it."""
    if mode is None or torch.overrides._get_current_function_mode() is not mode:
        yield
        return
    with torch.overrides._pop_mode_temporarily():
        yield


def abandon_step(unit: nn.Module) -> None:
    """Bring a unit whose step ended in an error back to its shards, without gradients that were not reduced yet.

    `FSDPModule.reset_iter_state` (public) does so since 2.13, but only from a root; `FSDPState._training_state`, since
    2.4, serves all versions and units.
    """
    if isinstance(unit, FSDPModule):
        _make_idle(unit)
        for group in _parameter_groups(unit):
            _drop_held(group, group.fsdp_params)
        unit.reshard()


def drop_held_gradients(unit: nn.Module, parameters: Collection[Tensor]) -> None:
    """Forget the gradients of `parameters`, as shards, that `unit` holds unreduced, or reduced but not averaged yet.

    `FSDPParam.unsharded_accumulated_grad` and `_unsharded_param`, since 2.4.
    """
    assert isinstance(unit, FSDPModule)
    for group in _parameter_groups(unit):
        _drop_held(group, [each for each in group.fsdp_params if each.sharded_param in parameters])


def _drop_held(group: Any, parameters: Sequence[Any]) -> None:
    if len(parameters) == len(group.fsdp_params):
        group._partial_reduce_output = None
    for parameter in parameters:
        parameter.unsharded_accumulated_grad = None
        if hasattr(parameter, "_unsharded_param"):
            parameter._unsharded_param.grad = None


def can_hold_gradients(unit: nn.Module) -> bool:
    """Whether torch can hold gradients of `unit`: one that widens them has to have run before.

    `FSDPParam.reduce_dtype` and `_unsharded_param`, since 2.4.
    """
    assert isinstance(unit, FSDPModule)
    parameters = [parameter for group in _parameter_groups(unit) for parameter in group.fsdp_params]
    return all(each.reduce_dtype is None or hasattr(each, "_unsharded_param") for each in parameters)


def holds_gradients(unit: nn.Module) -> bool:
    """Whether `unit` has gradients on this rank that are not reduced yet.

    `FSDPParam.unsharded_accumulated_grad` and `_unsharded_param`, since 2.4.
    """
    assert isinstance(unit, FSDPModule)
    return any(
        parameter.unsharded_accumulated_grad is not None
        or (hasattr(parameter, "_unsharded_param") and parameter._unsharded_param.grad is not None)
        for group in _parameter_groups(unit)
        for parameter in group.fsdp_params
    ) or any(group._partial_reduce_output is not None for group in _parameter_groups(unit))


def even_out_held_gradients(unit: nn.Module) -> None:
    """Let all gradients that `unit` holds wait in one dtype, zeros for parameters that were not used so far.

    Gradients that wait are widened to the dtype of reducing, and `foreach_reduce` takes no others beside them, such as
    those of a parameter that only the last microstep uses. `FSDPParam.unsharded_accumulated_grad`, since 2.4.
    """
    assert isinstance(unit, FSDPModule)
    for group in _parameter_groups(unit):
        if any(parameter.unsharded_accumulated_grad is not None for parameter in group.fsdp_params):
            for parameter in group.fsdp_params:
                whole = parameter._unsharded_param
                if parameter.unsharded_accumulated_grad is None and whole.requires_grad and whole.grad is None:
                    dtype = parameter.reduce_dtype or whole.dtype
                    parameter.unsharded_accumulated_grad = torch.zeros_like(whole, dtype=dtype)


def reduce_held_gradients(unit: nn.Module) -> None:
    """Reduce the gradients that `unit` holds unreduced, outside of any backward. A collective.

    What `FSDPParamGroup.post_backward` does in a backward, since 2.4; there is no public call.
    """
    assert isinstance(unit, FSDPModule)
    for group in _parameter_groups(unit):
        for parameter in group.fsdp_params:
            if hasattr(parameter, "_unsharded_param"):  # as it was gathered last: the user may have frozen it for that
                parameter._unsharded_param.requires_grad_(parameter.sharded_param.requires_grad)
        group.post_backward()
        group.finalize_backward()
    _make_idle(unit)


def whole_gradient_bytes(unit: nn.Module) -> int:
    """Bytes of the gradients of `unit` before they are reduced, in the dtype in which they wait.

    `FSDPParam.reduce_dtype` and `_orig_size`, since 2.4.
    """
    assert isinstance(unit, FSDPModule)
    total = 0
    for group in _parameter_groups(unit):
        for parameter in group.fsdp_params:
            if parameter.sharded_param.requires_grad:
                dtype = parameter.reduce_dtype or parameter.param_dtype or parameter.orig_dtype
                total += parameter._orig_size.numel() * dtype.itemsize
    return total


def _make_idle(unit: FSDPModule) -> None:
    state = unit._get_fsdp_state()
    idle = type(state._training_state).IDLE
    for part in (state, *_parameter_groups(unit)):
        part._training_state = idle


def _parameter_groups(unit: FSDPModule) -> list[Any]:
    """`FSDPState._fsdp_param_groups`, since 2.13, and `_fsdp_param_group` before; no public spelling."""
    state = unit._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def forget_sharding(module: nn.Module) -> None:
    """Drop torch's note that `module` is sharded, so that it can be sharded again.

    `torch.distributed._composable_state`, since 2.0; waits for an inverse of `fully_shard`.
    """
    from torch.distributed import _composable_state

    _composable_state._module_state_mapping.pop(module, None)


def gather_around(holder: Any, method: str, unit: nn.Module) -> None:
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


CAN_REDUCE_UNUSED = hasattr(FSDPModule, "set_reduce_scatter_unused_params")
"""Whether ranks can differ in what they use of a unit: since 2.13."""


def reduce_unused_parameters(unit: nn.Module) -> bool:
    """Let ranks that did not use a parameter of `unit` in a step take part in its reduction, with zeros.

    `FSDPModule.set_reduce_scatter_unused_params`, since 2.13; before, such a step hangs and there is nothing to set.
    Returns whether there is.
    """
    if not isinstance(unit, FSDPModule) or not CAN_REDUCE_UNUSED:
        return False
    unit.set_reduce_scatter_unused_params(True, recurse=False)
    return True


def gathered_parameters(unit: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of a parameter's shard and its gathered form, for those of `unit` that were gathered before.

    `FSDPParam._unsharded_param`, since 2.4; no public spelling.
    """
    assert isinstance(unit, FSDPModule)
    for group in _parameter_groups(unit):
        for parameter in group.fsdp_params:
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
def data_of_shards_set() -> Iterator[None]:
    """In here, ``parameter.data = values`` changes the values of a DTensor, as it does those of a plain tensor.

    Torch sets what is around the local tensor only, in all versions of the window, and says nothing: a teacher that is
    an average of weights would stand still. `DTensor.data` is inherited from `Tensor`; there is nothing public to set.
    """
    if "data" in vars(DTensor):  # already so
        yield
        return
    plain: Any = vars(torch._C.TensorBase)["data"]

    def set_data(self: Any, values: Any) -> None:
        is_alike = isinstance(values, DTensor) and values.shape == self.shape and values.dtype == self.dtype
        if is_alike and values.device == self.device and values.device_mesh == self.device_mesh:
            with torch.no_grad():
                self.detach().copy_(values)
        else:
            plain.__set__(self, values)

    DTensor.data = property(plain.__get__, set_data)  # type: ignore[assignment]
    try:
        yield
    finally:
        del DTensor.data


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


@contextlib.contextmanager
def attention_replaced(attention: Callable[..., Tensor]) -> Iterator[None]:
    """While this is open, functions of `torch.nn.functional` attend with `attention`.

    Inside of `multi_head_attention_forward`, a `TorchFunctionMode` that handles it sees no more calls.
    """
    original = nn.functional.scaled_dot_product_attention
    nn.functional.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        nn.functional.scaled_dot_product_attention = original


@contextlib.contextmanager
def slow_attention() -> Iterator[None]:
    """Without the fast path of `nn.MultiheadAttention`, which has an attention of its own.

    `torch.backends.mha.set_fastpath_enabled`, since 2.0; public, and here because it is a switch of the process.
    """
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


Function = TypeVar("Function", bound=Callable[..., Any])


def not_compiled(function: Function) -> Function:
    """Leave `function` out of graphs: the compiler cannot see through collectives with a backward of their own.

    `torch.compiler.disable`, since 2.1; public, and here because it has no annotations.
    """
    return torch.compiler.disable(function)  # type: ignore[no-any-return]


def part_of_graphs_only(function: Function) -> Function:
    """Compile `function` where a graph runs into it, and never for itself.

    For `__torch_function__` of a mode: where a layer under it is left uncompiled, perhaps because another strategy has
    had it compiled before, torch 2.13 compiles the mode's own function for each operation, and gets it wrong: a product
    is handed the shape of its operand. `tests/test_user_code.py` shows it.
    `torch._dynamo.eval_frame.skip_code`, since 2.1; `torch.compiler.disable` would end a graph at every operation.
    """
    torch._dynamo.eval_frame.skip_code(function.__code__)
    return function


def without_dispatch_modes() -> contextlib.AbstractContextManager[Any]:
    """Switch off `TorchDispatchMode`s, for operations that nobody shall count or keep.

    `torch.utils._python_dispatch._disable_current_modes`, since 2.0; no public spelling.
    """
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


def class_name(module: nn.Module) -> str:
    """The name of a module's class as its author wrote it: `fully_shard` puts "FSDP" in front, since 2.4."""
    return type(module).__name__.removeprefix("FSDP") if isinstance(module, FSDPModule) else type(module).__name__


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


def subclass_like(cls: type[nn.Module], forward: Callable[..., Any] | functools.partialmethod[Any]) -> type[nn.Module]:
    """A subclass of `cls` with another `forward` that reads and prints like `cls` itself."""
    return type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__, "__doc__": cls.__doc__})


def subclass_calling(cls: type[nn.Module], call: Callable[..., Any]) -> type[nn.Module]:
    """A subclass of `cls` with another `__call__`, around all hooks, that reads and prints like `cls` itself."""
    return type(cls.__name__, (cls,), {"__call__": call, "__module__": cls.__module__, "__doc__": cls.__doc__})


def as_parameter(tensor: Tensor) -> Any:
    """`tensor`, of a subclass, as a parameter of its module: the object itself and no detached copy.

    `nn.Parameter` marks tensors of subclasses by `_is_param`, since 1.12.
    """
    tensor._is_param = True  # type: ignore[attr-defined]
    return tensor


def activation_budget(budget: float) -> contextlib.AbstractContextManager[None]:
    """While this is open, what is compiled keeps at most a share `budget` of its activations for backward.

    `torch._functorch.config.activation_memory_budget`, since 2.4; no public spelling.
    """
    if budget == 1.0:
        return contextlib.nullcontext()
    from torch._functorch import config

    return config.patch(activation_memory_budget=budget)  # type: ignore[no-any-return]


@contextlib.contextmanager
def unscaling_shards(scaler: torch.amp.GradScaler) -> Iterator[None]:
    """While this is open, `scaler` unscales sharded and whole gradients together, and the ranks agree on the outcome.

    Its own `_unscale_grads_`, since 1.6, gives both kinds to one operation, which takes no mixture.
    """

    def unscale(optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool) -> dict[torch.device, Tensor]:
        by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for parameter in (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None):
            if parameter.grad.dtype == torch.float16 and not allow_fp16:
                raise ValueError("Attempting to unscale FP16 gradients.")
            local = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
            by_kind.setdefault((local.device, local.dtype), []).append(local)
        found = {device: found_inf.to(device, copy=True) for device, _ in by_kind}
        for (device, _), gradients in by_kind.items():
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, found[device], inv_scale.to(device))
        agreed = torch.stack([each.to(found_inf.device) for each in found.values()]).amax(0) if found else found_inf
        if dist.is_initialized():
            dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
        return {device: agreed.to(device) for device in found} or {found_inf.device: agreed}

    scaler._unscale_grads_ = unscale  # type: ignore[method-assign]
    try:
        yield
    finally:
        del scaler._unscale_grads_


def _operations(*names: str) -> frozenset[Any]:
    """The overloads of the operations that this torch has."""
    found = [getattr(torch.ops.aten, name) for name in names if hasattr(torch.ops.aten, name)]
    return frozenset(getattr(packet, overload) for packet in found for overload in packet.overloads())


MATRIX_PRODUCTS = _operations("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm")
"""The operations of `torch.ops.aten` that linear maps end up in; there is no public list."""

ATTENTIONS = _operations(
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
    "_scaled_dot_product_attention_math",
    "_flex_attention",
)
"""The operations that scaled-dot-product attention ends up in."""


NO_FUNCTION_OVERRIDE = torch._C._disabled_torch_function_impl
"""`__torch_function__` of a subclass that looks at operations below autograd only; since 1.7, no public name."""


def tensor_without_storage(cls: type[Any], meta: Tensor, device: torch.device) -> Any:
    """A tensor of the subclass `cls` that looks like `meta` on `device` and holds no memory.

    `Tensor._make_wrapper_subclass`, since 1.11; what torch's own subclasses use, no public spelling.
    """
    offset = int(meta.storage_offset())
    make: Any = Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
    return make(cls, meta.shape, strides=meta.stride(), storage_offset=offset, dtype=meta.dtype, device=device)


def follow_view(function: Any, args: Any, kwargs: Any) -> None:
    """Change shape and strides of a tensor without storage as `function`, such as ``transpose_``, does in place.

    `torch.Tag.inplace_view`, since 1.12, marks such operations; `torch._C._DisableTorchDispatch`, since 1.13, is what
    torch's own subclasses use. No public spelling.
    """
    if torch.Tag.inplace_view in function.tags:
        with torch._C._DisableTorchDispatch():  # type: ignore[attr-defined]
            function(*args, **kwargs)


def schedule_actions(name: str, num_ranks: int, stages_per_rank: int, num_microbatches: int) -> list[list[str]]:
    """For each rank what it computes, sends and receives in a step, in order, in torch's notation, such as ``"0F1"``.

    A stage's number, what is done (F, B, I, W, SEND_F, RECV_F, SEND_B, RECV_B) and a microbatch's number. The orders
    of `torch.distributed.pipelining.schedules`, which gives them to its own executor only: that one wants each
    microbatch of each step to have the shapes of the first. `_get_pipeline_order`, `_calculate_single_rank_operations`
    and `_add_send_recv`, since 2.5.
    """
    from torch.distributed.pipelining import schedules

    num_stages = num_ranks * stages_per_rank
    rounds = max(1, num_microbatches // num_ranks)
    state = SimpleNamespace(
        _num_stages=num_stages,
        _n_microbatches=num_microbatches,
        pp_group_size=num_ranks,
        n_local_stages=stages_per_rank,
        num_stages=num_stages,
        number_of_rounds=rounds,
        microbatches_per_round=num_microbatches // rounds,
    )
    cls: Any = {
        "gpipe": schedules.ScheduleGPipe,
        "1f1b": schedules.Schedule1F1B,
        "interleaved": schedules.ScheduleInterleaved1F1B,
        "zbv": schedules.ScheduleZBVZeroBubble,
        "dualpipev": schedules.ScheduleDualPipeV,
    }[name]
    if stages_per_rank == 1:
        order = cls._get_pipeline_order(state)
    else:
        order = {rank: cls._calculate_single_rank_operations(state, rank) for rank in range(num_ranks)}
    flat = [[str(each) for action in order[rank] for each in _computed(action)] for rank in range(num_ranks)]
    if name == "1f1b":  # torch 2.13 counts the forwards of the last rank from 1 on
        flat = [_numbered_forwards(actions) for actions in flat]
    return with_transfers(flat, is_v=name in V_SCHEDULES)


V_SCHEDULES = ("zbv", "dualpipev")
"""Schedules in which a rank has the stages ``rank`` and ``last - rank``."""


def with_transfers(computed: list[list[str]], *, is_v: bool) -> list[list[str]]:
    """The same orders with what has to be sent and received between, so that no rank waits for another in a circle.

    `torch.distributed.pipelining.schedules._add_send_recv`, since 2.5; no public spelling.
    """
    from torch.distributed.pipelining import schedules

    num_ranks = len(computed)
    actions = {rank: [schedules._Action.from_str(text) for text in texts] for rank, texts in enumerate(computed)}
    num_stages = 1 + max(action.stage_index for each in actions.values() for action in each)

    def rank_of(stage: int) -> int:
        return num_stages - 1 - stage if is_v and stage >= num_ranks else stage % num_ranks

    added = schedules._add_send_recv(actions, rank_of, num_stages)
    return [[str(action) for action in added[rank]] for rank in range(num_ranks)]


def _numbered_forwards(actions: list[str]) -> list[str]:
    forwards = itertools.count()
    return [f"{action.partition('F')[0]}F{next(forwards)}" if "F" in action else action for action in actions]


def _computed(action: Any) -> list[Any]:
    """The single computations of an action of torch's schedules; bubbles and reductions are none."""
    if action is None:
        return []
    if action.sub_actions is not None:
        return list(action.sub_actions)
    return [action] if action.computation_type.value in ("F", "B", "I", "W") else []


# Attention in a ring ------------------------------------------------------------------------------------------------

Block = Callable[..., tuple[Tensor, Tensor]]


def ring_attention(
    block: Block, query: Tensor, key: Tensor, value: Tensor, group: Any, *, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """Run `block` with the keys and values of each rank in turn; the merged output, and logarithms of sums.

    `torch.distributed.tensor.experimental._context_parallel._attention._templated_ring_attention`, with its balance of
    work under a causal mask; since 2.4. Its public spelling replaces all attention of the process, and knows no gloo.
    """
    from torch.distributed.tensor.experimental._context_parallel import _attention

    with _ring_options(query.dtype, balances=is_causal):
        output, sums, *_ = _attention._templated_ring_attention(group, 2, block, query, key, value, is_causal)
    return output, sums


def ring_attention_backward(
    block_backward: Callable[..., tuple[Tensor, ...]],
    gradient: Tensor,
    saved: Sequence[Tensor],
    group: Any,
    *,
    is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values, of which `saved` are those, the output and the logarithms of sums.

    `_templated_ring_attention_backward`, since 2.4.
    """
    from torch.distributed.tensor.experimental._context_parallel import _attention

    query, key, value, output, sums = saved
    with _ring_options(gradient.dtype, balances=is_causal):
        grad_query, grad_key, grad_value, *_ = _attention._templated_ring_attention_backward(
            group, 2, block_backward, gradient, "grad_out", query, key, value, output, sums, is_causal
        )
    return grad_query, grad_key, grad_value


@contextlib.contextmanager
def _ring_options(dtype: torch.dtype, *, balances: bool) -> Iterator[None]:
    """`_cp_options`, which are of the process: sums in fp32 but for fp64, one neighbour's keys at a time."""
    from torch.distributed.tensor.experimental._context_parallel import _attention

    options = _attention._cp_options
    before = dict(vars(options))
    options.convert_to_f32 = dtype != torch.float64
    options.enable_load_balance = balances
    options.rotate_method = _attention._RotateMethod.ALL_TO_ALL
    try:
        yield
    finally:
        vars(options).update(before)


def has_flash_attention(query: Tensor, value: Tensor) -> bool:
    """Whether there is a kernel of attention for tensors like these that returns logarithms of sums."""
    if query.shape[-1] != value.shape[-1]:
        return False
    if 0 in (query.numel(), value.numel()):  # the CPU's kernel divides by numbers of samples, heads and positions
        return False
    if query.device.type == "cpu":
        return hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu")
    is_half = query.dtype in (torch.float16, torch.bfloat16)
    return query.device.type == "cuda" and is_half and query.shape[-1] % 8 == 0 and query.shape[-1] <= 256


def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """The output and logarithms of sums, `[batch, heads, length]`.

    `_scaled_dot_product_flash_attention`, since 2.0, and `..._for_cpu`, since 2.2; no public spelling has the sums.
    """
    ops = torch.ops.aten
    kernel = ops._scaled_dot_product_flash_attention
    kernel = ops._scaled_dot_product_flash_attention_for_cpu if query.device.type == "cpu" else kernel
    output, sums, *_ = kernel(query, key, value, 0.0, is_causal, scale=scale)
    return output, sums


def flash_attention_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    sums: Tensor,
    *,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values; `flash_attention` in backward."""
    ops, tensors = torch.ops.aten, (gradient, query, key, value, output, sums)
    if query.device.type == "cpu":
        gradients = ops._scaled_dot_product_flash_attention_for_cpu_backward(*tensors, 0.0, is_causal, scale=scale)
    else:
        lengths = (None, None, query.shape[2], key.shape[2])  # of the sequences, all of which have the same
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=query.device), query.new_empty(0)
        gradients = ops._scaled_dot_product_flash_attention_backward(
            *tensors, *lengths, 0.0, is_causal, *no_dropout, scale=scale
        )
    grad_query, grad_key, grad_value = gradients
    return grad_query, grad_key, grad_value


@contextlib.contextmanager
def checkpoints_replaced(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """In here, what `torch.utils.checkpoint.checkpoint` is to run, now and again in backward, is ``wrap(function)``.

    `CheckpointFunction`, since 1.0, and `_checkpoint_without_reentrant_generator`, since 2.1, or what ends in `_impl`,
    since 2.14, which `checkpoint` looks up in its module; the function itself may have been imported anywhere.
    """
    from torch.utils import checkpoint as module

    checkpoint: Any = module
    name = "_checkpoint_without_reentrant_generator"
    name = f"{name}_impl" if hasattr(checkpoint, f"{name}_impl") else name
    reentrant, generator = checkpoint.CheckpointFunction, getattr(checkpoint, name)

    def apply(function: Callable[..., Any], *args: Any) -> Any:
        return reentrant.apply(wrap(function), *args)

    def without_reentrant(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return generator(wrap(function), *args, **kwargs)

    checkpoint.CheckpointFunction = SimpleNamespace(apply=apply)
    setattr(checkpoint, name, without_reentrant)
    try:
        yield
    finally:
        checkpoint.CheckpointFunction = reentrant
        setattr(checkpoint, name, generator)


def is_in_backward() -> bool:
    """Whether this runs in a backward, such as what is computed again.

    `torch._C._current_graph_task_id`, since 2.1; no public spelling.
    """
    return torch._C._current_graph_task_id() != -1

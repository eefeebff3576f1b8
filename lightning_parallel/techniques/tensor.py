"""Tensor parallel: each rank holds a part of the linear maps of each layer, and some of the heads. Layer 2.

Source: Shoeybi et al. 2019, "Megatron-LM". Hidden states between branches are whole on every rank. A branch begins with
maps split by columns, which read them as they are, and ends with one split by rows, whose results are added up: one
all-reduce a branch in forward, and one in backward, where maps that read the same hidden states share it.

In between, tensors are plain and local where the layer's code allows (it asks for ``-1`` heads), else DTensors, which
know how many heads there are in all. Which of the two is right for a layer, and whether either is, shows when it runs
for the first time: it is compared with its unsplit self, results and gradients.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._pytree import tree_map, tree_map_only

from lightning_parallel import _torch
from lightning_parallel.caches import is_cache
from lightning_parallel.errors import ConfigurationError
from lightning_parallel.exchange import chunk, enter, leave
from lightning_parallel.head_split import HeadSplit, attend_multihead
from lightning_parallel.layer_trace import is_transposed
from lightning_parallel.tensor_plan import TensorPlan

_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4}
_TOLERANCE_OF_HALF = 5e-2


def apply_tensor(layers: Sequence[tuple[str, nn.Module]], plan: TensorPlan, mesh: DeviceMesh) -> None:
    """Split the linear maps of `layers` over `mesh`, in place: their parameters become DTensors. Names stay.

    Args:
        layers: The layers of the stacks with their paths, whole and equal on every rank, or on the meta device.
        plan: What is split how.
        mesh: One axis: the ranks that share a matrix product.
    """
    kinds: dict[Any, SplitKind] = {}
    for path, layer in layers:
        roles = plan.below(path)
        if not roles:
            continue
        key = (type(layer), tuple(roles.items()))
        kind = kinds.setdefault(key, SplitKind(path, mesh))
        for name, role in roles.items():
            _split_map(layer.get_submodule(name), role, kind)
        layer.__class__ = _splitting(type(layer), kind)


class SplitKind:
    """What layers of one kind share: the ranks, and whether local tensors or DTensors run between their maps.

    Args:
        path: Where the first of them is.
        mesh: The ranks that share a matrix product.
    """

    def __init__(self, path: str, mesh: DeviceMesh) -> None:
        self.path = path
        self.mesh = mesh
        self.group: ProcessGroup = mesh.get_group()
        self.is_local = True
        self.is_checked = False
        self._entered: tuple[Tensor, Tensor] | None = None

    def enter(self, whole: Tensor) -> Tensor:
        """`whole`, entered once for all maps that read it: they share one all-reduce in backward."""
        if self._entered is None or self._entered[0] is not whole:
            self._entered = (whole, enter(whole, self.group))
        return self._entered[1]

    def forget(self) -> None:
        """A layer has ended."""
        self._entered = None

    def as_part(self, local: Tensor) -> Tensor:
        """What a map by columns hands on: `local`, or a DTensor that knows of the other ranks' parts."""
        if self.is_local:
            return local
        return DTensor.from_local(local, self.mesh, [Shard(local.ndim - 1)], run_check=False)

    def part_of(self, tensor: Tensor, length: int) -> Tensor:
        """This rank's `length` of the last dimension of what reaches a map by rows."""
        if isinstance(tensor, DTensor):
            return tensor.redistribute(placements=[Shard(tensor.ndim - 1)]).to_local()
        return tensor if tensor.shape[-1] == length else chunk(tensor, -1, self.group)

    def around(self) -> contextlib.AbstractContextManager[Any]:
        """What has to be entered while a layer runs."""
        return contextlib.nullcontext() if self.is_local else HeadSplit(self.mesh)


# Linear maps --------------------------------------------------------------------------------------------------------


def _split_map(linear: nn.Module, role: str, kind: SplitKind) -> None:
    if role == "heads":
        names = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias")
        _distribute(linear, dict.fromkeys(names, 0), kind.mesh)
        _distribute(cast(nn.Module, linear.out_proj), {"weight": 1}, kind.mesh)
        linear.__class__ = _torch.subclass_like(type(linear), functools.partialmethod(_attending, kind, type(linear)))
        return
    by_columns = role == "colwise"
    dims = {"weight": int(by_columns == is_transposed(linear))}
    _distribute(linear, {**dims, "bias": 0} if by_columns else dims, kind.mesh)
    run = _by_columns if by_columns else _by_rows
    linear.__class__ = _torch.subclass_like(type(linear), functools.partialmethod(run, kind, type(linear)))


def _distribute(module: nn.Module, dims: dict[str, int], mesh: DeviceMesh) -> None:
    for name, dim in dims.items():
        own = module._parameters.get(name)
        if own is not None:
            # Without a source rank, every rank cuts its part out of its own copy: no communication.
            part = distribute_tensor(own.detach(), mesh, [Shard(dim)], src_data_rank=None)
            split = nn.Parameter(part, requires_grad=own.requires_grad)
            split.__dict__.update(vars(own))
            setattr(module, name, split)


def _by_columns(self: Any, kind: SplitKind, cls: type[Any], whole: Tensor) -> Any:
    if not isinstance(self.weight, DTensor):
        return cls.forward(self, whole)
    return kind.as_part(_product(self, kind.enter(_plain(whole)), _local(self.bias)))


def _by_rows(self: Any, kind: SplitKind, cls: type[Any], tensor: Tensor) -> Any:
    if not isinstance(self.weight, DTensor):
        return cls.forward(self, tensor)
    width = self.weight.to_local().shape[0 if is_transposed(self) else 1]
    whole = leave(_product(self, kind.part_of(tensor, width), None), kind.group)
    return whole if self.bias is None else whole + self.bias.to(whole.dtype)


def _product(linear: Any, states: Tensor, bias: Tensor | None) -> Tensor:
    weight = linear.weight.to_local()
    return F.linear(states, weight.t() if is_transposed(linear) else weight, bias)


def _attending(self: Any, kind: SplitKind, cls: type[Any], *args: Any, **kwargs: Any) -> Any:
    if not isinstance(self.out_proj.weight, DTensor):
        return cls.forward(self, *args, **kwargs)
    return attend_multihead(self, kind.enter, kind.group, *args, **kwargs)


def _local(parameter: Any) -> Any:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _plain(tensor: Tensor) -> Tensor:
    """A tensor that is whole on every rank, with which each goes on in its own way."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


# Layers -------------------------------------------------------------------------------------------------------------


def _splitting(cls: type[Any], kind: SplitKind) -> type[nn.Module]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        function = functools.partial(cls.forward, self)
        if not kind.is_checked:
            _check(self, kind, function, args, kwargs)
        return _run(kind, function, args, kwargs)

    return _torch.subclass_like(cls, forward)


def _run(kind: SplitKind, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    try:
        with _torch.slow_attention(), kind.around():
            output = function(*args, **kwargs)
    finally:
        kind.forget()
    return output if kind.is_local else tree_map_only(DTensor, _result, output)


def _result(tensor: Any) -> Any:
    whole = tensor.full_tensor()
    return whole.clone() if whole._is_view() else whole  # FSDP2 refuses a view, which may be written into


@_torch.not_compiled
def _check(layer: nn.Module, kind: SplitKind, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """Compare the split layer with its unsplit self, without dropout; choose local tensors or DTensors.

    Raises:
        ConfigurationError: If they differ either way, with where the difference begins.
    """
    modes = {child: child.training for child in layer.modules()}
    layer.eval()
    failures = []
    try:
        with torch.enable_grad(), _torch.without_dispatch_modes(), saved_tensors_hooks(_same, _same):
            with _whole_weights(layer, kind.mesh):
                whole = _Probe(layer, lambda *a, **k: _run(kind, function, a, k), args, kwargs)
            for kind.is_local in (True, False):
                failures.append(_compare(layer, kind, function, args, kwargs, whole))
                if not failures[-1]:
                    break
    finally:
        for child, mode in modes.items():
            child.training = mode
    if failures[-1]:
        raise ConfigurationError([f"{kind.path} ({_torch.class_name(layer)}) {failures[-1]}"])
    kind.is_checked = True


def _compare(
    layer: nn.Module, kind: SplitKind, function: Callable[..., Any], args: Any, kwargs: Any, whole: _Probe
) -> str:
    try:
        split = _Probe(layer, lambda *a, **k: _run(kind, function, a, k), args, kwargs)
        failure = split.difference(whole)
    except (RuntimeError, AssertionError, IndexError, ValueError, TypeError, NotImplementedError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        failure = f"fails when its linear maps are split over ranks: {reason[0]}; {_REMEDY}"
    has_failed = torch.tensor(int(bool(failure)), device=kind.mesh.device_type)
    dist.all_reduce(has_failed, op=dist.ReduceOp.MAX, group=kind.group)
    return failure if failure or not has_failed else f"differs on another rank when it is split; {_REMEDY}"


def _same(saved: Any) -> Any:
    return saved  # whoever recomputes activations must not count those of a probe


_REMEDY = "leave the maps concerned out of tensor_plan, or give tensor=1"


class _Probe:
    """What a layer computes from given arguments: its result, and the gradients of hidden states and parameters.

    Args:
        layer: The layer, for its parameters.
        run: Runs it.
        args: Its arguments.
        kwargs: Its arguments by name.
    """

    def __init__(self, layer: nn.Module, run: Callable[..., Any], args: Any, kwargs: Any) -> None:
        inputs: list[Tensor] = []

        def fresh(tensor: Tensor) -> Tensor:
            copy = tensor.detach()
            if (tensor.is_floating_point() and tensor.requires_grad) or (tensor.is_floating_point() and not inputs):
                copy.requires_grad_()
                inputs.append(copy)
            return copy

        args, kwargs = tree_map_only(Tensor, fresh, tree_map(_without_cache, (args, kwargs)))
        output = run(*args, **kwargs)
        first = output[0] if isinstance(output, tuple) else output
        self.result = first.detach()
        parameters = {n: p for n, p in layer.named_parameters() if p.requires_grad}
        wave = torch.linspace(-1, 1, first.numel(), device=first.device).cos().view(first.shape).to(first.dtype)
        gradients = torch.autograd.grad(first, [*inputs, *parameters.values()], wave, allow_unused=True)
        names = [*("hidden states" for _ in inputs), *parameters]
        self.gradients = [
            (name, None if g is None else _whole(g).detach()) for name, g in zip(names, gradients, strict=True)
        ]

    def difference(self, whole: _Probe) -> str:
        """In words, where this differs from `whole`; empty if it does not."""
        if message := _difference("its result", self.result, whole.result):
            return message
        largest = max((float(g.abs().max()) for _, g in whole.gradients if g is not None), default=0.0)
        for (name, ours), (_, theirs) in zip(self.gradients, whole.gradients, strict=True):
            if (ours is None) != (theirs is None):
                return f"has {'no' if ours is None else 'a'} gradient of {name} when it is split; {_REMEDY}"
            if ours is not None and theirs is not None:
                message = _difference(f"the gradient of {name}", ours, theirs, scale=largest / 10)
                if message:
                    return message
        return ""


def _without_cache(value: Any) -> Any:
    """A probe would fill a cache of keys and values a second time."""
    return None if is_cache(value) else value


def _whole(gradient: Tensor) -> Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def _difference(what: str, ours: Tensor, whole: Tensor, *, scale: float = 1e-6) -> str:
    """In words, where `ours` differs; `scale` is what counts as a size where `whole` is zero in exact arithmetic."""
    if ours.shape != whole.shape:
        return f"computes {what} as {tuple(ours.shape)} in place of {tuple(whole.shape)} when it is split; {_REMEDY}"
    allowed = _TOLERANCE.get(whole.dtype, _TOLERANCE_OF_HALF) * max(float(whole.abs().max()), scale)
    errors = (ours - whole).abs().float()
    if float(errors.max()) <= allowed:
        return ""
    begin = tuple(int(index) for index in (errors > allowed).nonzero()[0])
    return (
        f"computes something else when its linear maps are split: {what} differs by {float(errors.max()):.2g} where "
        f"{allowed:.2g} is allowed, from index {begin} on; {_REMEDY}"
    )


@contextlib.contextmanager
def _whole_weights(layer: nn.Module, mesh: DeviceMesh) -> Iterator[None]:
    """While this is open, the split parameters of `layer` are whole on every rank. A collective."""
    before: list[tuple[nn.Module, str, nn.Parameter]] = []
    try:
        for child in layer.modules():
            for name, parameter in list(child._parameters.items()):
                if isinstance(parameter, DTensor):
                    whole = parameter.detach().redistribute(mesh, [Replicate()]).to_local()
                    child._parameters[name] = nn.Parameter(whole, parameter.requires_grad)
                    before.append((child, name, parameter))
        yield
    finally:
        for child, name, parameter in before:
            child._parameters[name] = parameter

"""Tensor parallel: each rank holds a part of the linear maps of each layer, and some of the heads. Layer 2.

Source: Shoeybi et al. 2019, "Megatron-LM". A branch begins with maps split by columns, which read whole hidden states,
and ends with one split by rows, whose results are added up: one all-reduce a branch in forward, and one in backward,
where maps that read the same hidden states share it. How hidden states are held between branches is a matter of the
borders (`tensor_borders`).

Inside a branch, tensors are plain and local where the layer's code allows (it asks for ``-1`` heads), else DTensors,
which know how many heads there are in all. Which of the two is right for a layer, and whether either is, shows when it
runs for the first time: it is compared with its unsplit self, results and gradients.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._pytree import tree_map_only

from lightning_parallel import _torch
from lightning_parallel.caches import without_fresh_cache
from lightning_parallel.errors import ConfigurationError
from lightning_parallel.ghosts import is_ghost
from lightning_parallel.head_split import HeadSplit, attend_multihead
from lightning_parallel.hidden_states import Lengths
from lightning_parallel.layer_probe import REMEDY, LayerProbe, probing
from lightning_parallel.layer_trace import is_transposed
from lightning_parallel.tensor_borders import SequenceBorders, WholeBorders
from lightning_parallel.tensor_plan import TensorPlan


def apply_tensor(
    stacks: Sequence[Sequence[tuple[str, nn.Module]]],
    plan: TensorPlan,
    mesh: DeviceMesh,
    *,
    peers: ProcessGroup,
    sequence: bool = False,
) -> list[Lengths]:
    """Split the linear maps of the layers over `mesh`, in place: their parameters become DTensors. Names stay.

    Args:
        stacks: For each stack its layers with their paths, in the order in which they run; whole and equal on every
            rank, or on the meta device.
        plan: What is split how.
        mesh: One axis: the ranks that share a matrix product.
        peers: All ranks that hold these layers, in host memory.
        sequence: Whether each rank has a part of the positions between branches.

    Returns:
        The lengths of sequences that are cut, for each stack.
    """
    group: ProcessGroup = mesh.get_group()
    split: dict[nn.Parameter, nn.Parameter] = {}
    flows: dict[Any, Flow] = {}
    lengths = [Lengths(mesh.size()) for _ in stacks] if sequence else []
    for number, stack in enumerate(stacks):
        for index, (path, layer) in enumerate(stack):
            roles = plan.below(path)
            if (not roles and not sequence) or any(layer is earlier for _, earlier in stack[:index]):
                continue
            key = number, type(layer), tuple(roles.items()), _settings(layer)
            flow = flows.setdefault(key, Flow(path, mesh, peers))
            is_first, is_last = index == 0, index == len(stack) - 1
            borders = (
                SequenceBorders(group, is_first=is_first, is_last=is_last, lengths=lengths[number])
                if sequence
                else WholeBorders(group)
            )
            _split_layer(layer, roles, SplitLayer(path, flow, borders, lengths[number] if sequence else None), split)
    return lengths


def _settings(layer: nn.Module) -> tuple[Any, ...]:
    """What may make layers of one class compute differently; a layer's number is none of it."""
    return tuple(
        (path, type(child), name, value)
        for path, child in layer.named_modules()
        for name, value in sorted(vars(child).items())
        if isinstance(value, int | float | str | None)
        and name != "training"
        and not name.endswith(("idx", "index", "layer_id"))
    )


class Flow:
    """What runs between the maps of layers of one kind: local tensors, or DTensors.

    Args:
        path: Where the first of these layers is.
        mesh: The ranks that share a matrix product.
        peers: All ranks that hold these layers: they choose alike.
    """

    def __init__(self, path: str, mesh: DeviceMesh, peers: ProcessGroup) -> None:
        self.path = path
        self.mesh = mesh
        self.peers = peers
        self.is_local = True
        self.is_checked = False

    def as_part(self, local: Tensor) -> Tensor:
        """What a map by columns hands on: `local`, or a DTensor that knows of the other ranks' parts."""
        if self.is_local:
            return local
        return DTensor.from_local(local, self.mesh, [Shard(local.ndim - 1)], run_check=False)


class SplitLayer:
    """One layer: how it runs.

    Args:
        path: Where it is.
        flow: What runs between its maps.
        borders: How hidden states pass into its branches and out of them.
        lengths: What is cut along the sequence, if anything is.
    """

    def __init__(self, path: str, flow: Flow, borders: WholeBorders, lengths: Lengths | None) -> None:
        self.path = path
        self.flow = flow
        self.borders = borders
        self.lengths = lengths
        self.is_whole = False  # while it is its unsplit self

    def run(self, layer: nn.Module, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The layer on hidden states as they are between layers."""
        if self.is_whole:
            return function(*args, **kwargs)
        if not self.flow.is_local:
            return self._run_on_dtensors(layer, function, args, kwargs)
        with _torch.slow_attention():
            return self.borders.run_layer(layer, function, args, kwargs)

    @_torch.not_compiled  # torch 2.13 computes something else once it has compiled as many frames as it may
    def _run_on_dtensors(self, layer: nn.Module, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with _torch.slow_attention(), HeadSplit(self.flow.mesh, self.borders):
            output = self.borders.run_layer(layer, function, args, kwargs)
        return tree_map_only(DTensor, _result, output)

    @contextlib.contextmanager
    def unsplit(self) -> Iterator[None]:
        """In here, it is its unsplit self, with whatever stands for its parameters."""
        self.is_whole = True
        try:
            yield
        finally:
            self.is_whole = False

    def is_unsplit(self, weight: Tensor) -> bool:
        """Whether a map with `weight` runs as it is: for comparison, or to show a pipeline what it returns."""
        return self.is_whole or is_ghost(weight)

    def branch(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A submodule in which a branch begins."""
        return function(*args, **kwargs) if self.is_whole else self.borders.run_branch(function, args, kwargs)


def _result(tensor: Any) -> Any:
    whole = tensor.full_tensor()
    return whole.clone() if whole._is_view() else whole  # FSDP2 refuses a view, which may be written into


# Linear maps --------------------------------------------------------------------------------------------------------


def _split_layer(
    layer: nn.Module, roles: dict[str, str], split: SplitLayer, parameters: dict[nn.Parameter, nn.Parameter]
) -> None:
    distribute = functools.partial(_distribute, mesh=split.flow.mesh, known=parameters)
    for name, role in roles.items():
        linear = layer.get_submodule(name)
        if role == "heads":
            names = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias")
            distribute(linear, dict.fromkeys(names, 0))
            distribute(cast(nn.Module, linear.out_proj), {"weight": 1})
            run: Callable[..., Any] = _attending
        else:
            dims = {"weight": int((role == "colwise") == is_transposed(linear))}
            distribute(linear, {**dims, "bias": 0} if role == "colwise" else dims)
            run = _by_columns if role == "colwise" else _by_rows
        linear.__class__ = _torch.subclass_like(type(linear), functools.partialmethod(run, split, type(linear)))
    if split.lengths is not None:
        parents = dict.fromkeys(name.rpartition(".")[0] for name, role in roles.items() if role == "colwise")
        for parent in (layer.get_submodule(name) for name in parents if name):
            parent.__class__ = _torch.subclass_like(
                type(parent), functools.partialmethod(_branching, split, type(parent))
            )
    layer.__class__ = _torch.subclass_like(type(layer), functools.partialmethod(_splitting, split, type(layer)))


def _distribute(
    module: nn.Module, dims: dict[str, int], *, mesh: DeviceMesh, known: dict[nn.Parameter, nn.Parameter]
) -> None:
    for name, dim in dims.items():
        own = module._parameters.get(name)
        if own is None or isinstance(own, DTensor):
            continue
        if own not in known:
            # Without a source rank, every rank cuts its part out of its own copy: no communication.
            part = distribute_tensor(own.detach(), mesh, [Shard(dim)], src_data_rank=None)
            known[own] = nn.Parameter(part, requires_grad=own.requires_grad)
            known[own].__dict__.update(vars(own))
        setattr(module, name, known[own])


def _by_columns(self: Any, split: SplitLayer, cls: type[Any], states: Tensor) -> Any:
    if split.is_unsplit(self.weight):
        return cls.forward(self, states)
    states = states.full_tensor() if isinstance(states, DTensor) else states
    bias = self.bias.to_local() if isinstance(self.bias, DTensor) else self.bias
    return split.flow.as_part(_product(self, split.borders.enter(states), bias))


def _by_rows(self: Any, split: SplitLayer, cls: type[Any], states: Tensor) -> Any:
    if split.is_unsplit(self.weight):
        return cls.forward(self, states)
    if isinstance(states, DTensor):
        states = states.redistribute(placements=[Shard(states.ndim - 1)]).to_local()
    elif states.shape[-1] != self.weight.to_local().shape[0 if is_transposed(self) else 1]:
        states = split.borders.divide(states)
    result = split.borders.leave(_product(self, states, None))
    return result if self.bias is None else result + self.bias.to(result.dtype)


def _product(linear: Any, states: Tensor, bias: Tensor | None) -> Tensor:
    weight = linear.weight.to_local()
    return F.linear(states, weight.t() if is_transposed(linear) else weight, bias)


def _attending(self: Any, split: SplitLayer, cls: type[Any], *args: Any, **kwargs: Any) -> Any:
    if split.is_unsplit(self.out_proj.weight):
        return cls.forward(self, *args, **kwargs)
    return attend_multihead(self, split.borders, *args, **kwargs)


def _branching(self: Any, split: SplitLayer, cls: type[Any], *args: Any, **kwargs: Any) -> Any:
    return split.branch(functools.partial(cls.forward, self), args, kwargs)


# Layers, and the comparison -----------------------------------------------------------------------------------------


def _splitting(self: Any, split: SplitLayer, cls: type[Any], *args: Any, **kwargs: Any) -> Any:
    if torch.is_grad_enabled():  # nobody reads a cache of some heads in training; Hugging Face fills one there, too
        args = tuple(without_fresh_cache(self, args))
        kwargs = dict(zip(kwargs, without_fresh_cache(self, kwargs.values()), strict=True))
    function = functools.partial(cls.forward, self)
    if not split.flow.is_checked:
        _check(self, split, function, args, kwargs)
    return split.run(self, function, args, kwargs)


@_torch.not_compiled
def _check(layer: nn.Module, split: SplitLayer, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """Compare the split layer with its unsplit self; choose what runs between its maps.

    Raises:
        ConfigurationError: If they differ either way, with where the difference begins.
    """
    arguments = split.borders.whole_arguments(args, kwargs)
    borders, failure = split.borders, ""
    run = functools.partial(split.run, layer, function)
    try:
        for doubles in (True, False):
            with torch.enable_grad(), probing(layer, arguments, doubles=doubles) as (args, kwargs):
                probe = functools.partial(LayerProbe, layer, run, args, kwargs)
                whole, error = _probe_whole(layer, split, probe)
                if whole is None and doubles:  # not everything computes in fp64
                    if error is not None:
                        error.__traceback__ = None  # its frames hold the copies
                    continue
                if error is not None and split.borders.is_at_entry:
                    raise error  # the code's own
                if whole is None:
                    failure = f"cannot be compared with its unsplit self ({error or 'on another rank'}); {REMEDY}"
                    break
                split.borders = borders.alone()
                failure = _choose_flow(layer, split, probe, whole)
                break
    finally:
        split.borders = borders
    if failure:
        raise ConfigurationError([f"{split.path} ({_torch.class_name(layer)}) {failure}"])
    split.flow.is_checked = True


def _probe_whole(
    layer: nn.Module, split: SplitLayer, probe: Callable[[], LayerProbe]
) -> tuple[LayerProbe | None, Exception | None]:
    """The unsplit layer's results if all ranks have them, and this rank's error. A collective."""
    whole, error = None, None
    try:
        with _whole(layer, split):
            whole = probe()
    except Exception as caught:
        error = caught
    return (None, error) if _any_failed(error is not None, split.flow.peers) else (whole, None)


def _any_failed(has_failed: bool, peers: ProcessGroup) -> bool:
    """Whether any of the ranks has; they go on together, or not at all."""
    flag = torch.tensor(int(has_failed))
    dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=peers)
    return bool(flag)


def _choose_flow(layer: nn.Module, split: SplitLayer, probe: Callable[[], LayerProbe], whole: LayerProbe) -> str:
    """Find what runs between the maps so that nothing changes. Returns why nothing does, or an empty text."""
    failure = ""
    for dim, is_local in itertools.product(_sequence_dims(layer, split), (True, False)):
        split.flow.is_local = is_local
        if split.lengths is not None:
            split.lengths.dim = dim
        failure = _compare(split, probe, whole)
        if not failure:
            break
    return failure


def _compare(split: SplitLayer, probe: Callable[[], LayerProbe], whole: LayerProbe) -> str:
    try:
        failure = probe().difference(whole)
    except (RuntimeError, AssertionError, IndexError, KeyError, ValueError, TypeError, NotImplementedError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        failure = f"fails when its linear maps are split over ranks: {reason[0]}; {REMEDY}"
    if _any_failed(bool(failure), split.flow.peers) and not failure:
        return f"differs on another rank when it is split; {REMEDY}"
    return failure


def _sequence_dims(layer: nn.Module, split: SplitLayer) -> Sequence[int]:
    """Which dimension of hidden states may be the sequence, the likelier one first."""
    if split.lengths is None:
        return (1,)
    if split.lengths.whole:  # an earlier layer of the stack has shown it
        return (split.lengths.dim,)
    is_batch_first = all(c.batch_first for c in layer.modules() if isinstance(c, nn.MultiheadAttention))
    return (1, 0) if is_batch_first else (0, 1)


@contextlib.contextmanager
def _whole(layer: nn.Module, split: SplitLayer) -> Iterator[None]:
    """While this is open, `layer` is its unsplit self on every rank. A collective."""
    before: list[tuple[nn.Module, str, nn.Parameter]] = []
    try:
        for child in layer.modules():
            for name, parameter in list(child._parameters.items()):
                if isinstance(parameter, DTensor):
                    whole = parameter.detach().redistribute(split.flow.mesh, [Replicate()]).to_local()
                    child._parameters[name] = nn.Parameter(whole, parameter.requires_grad)
                    before.append((child, name, parameter))
        with split.unsplit():
            yield
    finally:
        for child, name, parameter in before:
            child._parameters[name] = parameter

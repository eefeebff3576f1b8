"""What a layer computes, to be compared with what it computes when it is split. Layer 1."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from lightning_parallel import _torch
from lightning_parallel.module.dry_run import side_effects_undone
from lightning_parallel.module.kv_cache import is_cache

_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4}
"""Of the largest element. Layers compute parts in fp32 even where all they are given is fp64."""
_TOLERANCE_OF_HALF = 5e-2
_HARDLY = 1e-2
"""A parameter that is smaller all over, such as a branch's gate that begins at zero, hides what is behind it."""
REMEDY = "leave the maps concerned out of tensor_plan, or give sequence=False or tensor=1"


@contextlib.contextmanager
def probing(layer: nn.Module, arguments: Any, *, doubles: bool) -> Iterator[Any]:
    """While this is open, `layer` can be run for comparison: without dropout, unseen by whoever counts or recomputes.

    In fp64, what two orders of summation differ by is so small that a real difference, however slight, shows. In place
    of parameters that are zero or next to it, there are others meanwhile: else a whole branch would go unseen.

    Args:
        layer: The layer; its parameters may be DTensors.
        arguments: What it is given.
        doubles: Whether to compute in fp64, where the layer can.

    Yields:
        The arguments to run it on.
    """
    modes = {child: child.training for child in layer.modules()}
    tables: list[dict[str, Any]] = [child._buffers for child in layer.modules()]
    tables += [child._parameters for child in layer.modules()]  # type: ignore[misc]
    tensors = [dict(table) for table in tables]
    device = next((leaf.device.type for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)), "cpu")
    copies: dict[int, Any] = {}  # what is tied stays tied
    try:
        layer.eval()
        for table in tables:
            for name, tensor in table.items():
                table[name] = copies.setdefault(id(tensor), _copy(tensor, doubles=doubles))
        autocast = torch.autocast(
            device,
            dtype=torch.get_autocast_dtype(device),
            enabled=torch.is_autocast_enabled(device) and not doubles,
            cache_enabled=False,
        )
        with (
            _torch.modes.without_dispatch_modes(),
            saved_tensors_hooks(_same, _same),
            autocast,
            side_effects_undone(layer),
        ):
            yield tree_map_only(Tensor, _double, arguments) if doubles else arguments
    finally:
        for table, before in zip(tables, tensors, strict=True):
            table.update(before)
        for child, mode in modes.items():
            child.training = mode


def _copy(tensor: Any, *, doubles: bool) -> Any:
    """A parameter in fp64 that wants a gradient, frozen or not; a buffer that may be written into."""
    if tensor is None:
        return None
    copy = _double(tensor) if doubles else tensor.detach()
    if isinstance(tensor, nn.Parameter):
        seen = _noticeable(copy)
        return tensor if seen is copy and not doubles else nn.Parameter(seen, seen.is_floating_point())
    return copy if copy is not tensor and copy.dtype != tensor.dtype else copy.clone()


def _noticeable(tensor: Tensor) -> Tensor:
    """`tensor`, or a wave in the place of one that is next to zero; the same on each rank that has the same part."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if (
        not (local.is_floating_point() and local.numel())
        or local.is_meta
        or float(local.detach().abs().max()) >= _HARDLY
    ):
        return tensor
    begin = 0  # parts of a whole are different ones
    if isinstance(tensor, DTensor):
        coordinates = tensor.device_mesh.get_coordinate() or ()
        begin = sum(at for at, placement in zip(coordinates, tensor.placements, strict=True) if placement.is_shard())
    positions = torch.arange(local.numel(), device=local.device) + begin * local.numel()
    wave = positions.cos().view(local.shape).to(local.dtype) / 4
    if not isinstance(tensor, DTensor):
        return wave
    return DTensor.from_local(
        wave, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def _double(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    return tensor.detach().double().requires_grad_(tensor.requires_grad)


def _same(saved: Any) -> Any:
    return saved


class LayerProbe:
    """What a layer computes from given arguments: its result, and the gradients of hidden states and parameters.

    Args:
        layer: The layer, for its parameters.
        run: Runs it on arguments and arguments by name.
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
        before = {id(value) for child in layer.modules() for value in vars(child).values()}
        output = run(args, kwargs)
        # What a layer keeps for the loss is a result, too.
        kept = [value for child in layer.modules() for value in vars(child).values() if id(value) not in before]
        results = [leaf for leaf in tree_leaves((output, kept)) if isinstance(leaf, Tensor) and leaf.requires_grad]
        self.results = [result.detach() for result in results]
        parameters = {n: p for n, p in layer.named_parameters() if p.requires_grad}
        waves = [torch.linspace(-1, 1, r.numel(), device=r.device).cos().view(r.shape).to(r.dtype) for r in results]
        gradients = torch.autograd.grad(results, [*inputs, *parameters.values()], waves, allow_unused=True)
        names = [*("hidden states" for _ in inputs), *parameters]
        self.gradients = [
            (name, None if g is None else _whole(g).detach()) for name, g in zip(names, gradients, strict=True)
        ]

    def difference(self, whole: LayerProbe) -> str:
        """In words, where this differs from `whole`; empty if it does not."""
        if len(self.results) != len(whole.results):
            return f"has {len(self.results)} results in place of {len(whole.results)} when it is split; {REMEDY}"
        for ours, theirs in zip(self.results, whole.results, strict=True):
            if message := _difference("its result", ours, theirs):
                return message
        largest = max((float(g.abs().max()) for _, g in whole.gradients if g is not None), default=0.0)
        for (name, ours), (_, theirs) in zip(self.gradients, whole.gradients, strict=True):
            if (ours is None) != (theirs is None):
                return f"has {'no' if ours is None else 'a'} gradient of {name} when it is split; {REMEDY}"
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
        return f"computes {what} as {tuple(ours.shape)} in place of {tuple(whole.shape)} when it is split; {REMEDY}"
    allowed = _TOLERANCE.get(whole.dtype, _TOLERANCE_OF_HALF) * max(float(whole.abs().max()), scale)
    errors = (ours - whole).abs().float()
    if float(errors.max()) <= allowed:
        return ""
    begin = tuple(int(index) for index in (errors > allowed).nonzero()[0])
    return (
        f"computes something else when its linear maps are split: {what} differs by {float(errors.max()):.2g} where "
        f"{allowed:.2g} is allowed, from index {begin} on; {REMEDY}"
    )

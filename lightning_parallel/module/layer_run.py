"""One run of a layer for comparison: its results, and its gradients, without a trace of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map

from lightning_parallel import _torch
from lightning_parallel.module.collected import collected_from_now
from lightning_parallel.module.dry_run import side_effects_undone
from lightning_parallel.module.kv_cache import is_cache
from lightning_parallel.module.object_state import Contents
from lightning_parallel.ranks.dtensors import full_of, local_of

HIDDEN_STATES = "hidden states"
"""The name of what a layer is given first; of a parameter it is the parameter's own."""
ROUNDING = "rounds_products"
"""A map with this attribute multiplies in fewer digits than its dtype has, but where it is false."""
_OTHER = "another argument"
_NEAR_ZERO = 1e-2
"""A parameter that is smaller all over, such as a branch's gate that begins at zero, hides what is behind it."""


@contextlib.contextmanager
def probing(layer: nn.Module, given: Any, *, doubles: bool, device: str) -> Iterator[None]:
    """Let `layer` be run for comparison: without dropout, unseen by whoever counts or recomputes.

    In fp64, what two orders of summation differ by is so small that a real difference, however slight, shows; maps
    that round what they multiply do not round it then. In place of parameters that are zero or next to it, there are
    others meanwhile: else a whole branch would go unseen.

    Args:
        layer: The layer; its parameters may be DTensors.
        given: Its arguments, in containers.
        doubles: Whether to compute in fp64, where the layer can.
        device: The kind of device that it runs on.
    """
    modes = [Contents(vars(child), lambda name, _: name in ("training", ROUNDING)) for child in layer.modules()]
    # A scripted module has no tables that could be changed; one with parameters is refused where layers are compared.
    plain = [child for child in layer.modules() if not isinstance(child, torch.jit.ScriptModule)]
    tables: list[dict[str, Any]] = [child._buffers for child in plain]
    tables += [child._parameters for child in plain]  # type: ignore[misc]
    before = [*modes, *map(Contents, tables)]
    copies: dict[int, Any] = {}  # what is tied stays tied
    try:
        layer.eval()
        for child in layer.modules():
            if ROUNDING in vars(child):
                setattr(child, ROUNDING, False)
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
            saved_tensors_hooks(_same, _same),
            _torch.autograd.reentrant_checkpoints_avoided(),
            autocast,
            side_effects_undone(layer, given),
        ):
            yield
    finally:
        for contents in before:
            contents.restore()


def _copy(tensor: Any, *, doubles: bool) -> Any:
    """A parameter in fp64 that wants a gradient, frozen or not; a buffer that may be written into."""
    if tensor is None:
        return None
    copy = _detached(tensor, doubles=doubles)
    if isinstance(tensor, nn.Parameter):
        seen = _noticeable(copy)
        return tensor if seen is copy and not doubles else nn.Parameter(seen, seen.is_floating_point())
    return copy if copy is not tensor and copy.dtype != tensor.dtype else copy.clone()


def _noticeable(tensor: Tensor) -> Tensor:
    """`tensor`, or a wave in the place of one that is next to zero; the same on each rank that has the same part."""
    local = local_of(tensor)
    if (
        not (local.is_floating_point() and local.numel())
        or local.is_meta
        or float(local.detach().abs().max()) >= _NEAR_ZERO
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


def _detached(tensor: Tensor, *, doubles: bool) -> Tensor:
    return tensor.detach().double() if doubles and tensor.is_floating_point() else tensor.detach()


def _same(saved: Any) -> Any:
    return saved


@dataclass(frozen=True)
class Gradient:
    """The gradient of one input of a layer.

    Args:
        name: Of a parameter, or what it is of the layer's arguments.
        value: Zeros where there is none.
        is_there: Whether there is one.
        is_of_parameter: Whether training reduces it.
    """

    name: str
    value: Tensor
    is_there: bool
    is_of_parameter: bool


class LayerRun:
    """A layer's results for given arguments, and after `backward` the gradients of its inputs.

    Make it, and call `backward`, within `probing`.

    Args:
        layer: The layer, for its parameters.
        run: Runs it on arguments and arguments by name.
        arguments: Both. The layer is given copies, into which it may write.
        doubles: Whether they are given in fp64.

    Attributes:
        results: The floating-point tensors that it has returned, hidden states before others.
        kept: Those that it has kept in its attributes, or its hooks in a list, for a loss.
        gradients: Those of hidden states, of other arguments that require one, and of parameters.
    """

    def __init__(self, layer: nn.Module, run: Callable[..., Any], arguments: Any, *, doubles: bool) -> None:
        given = _Arguments(doubles)
        args, kwargs = tree_map(given.copy_of, arguments)
        before, collected = _attributes(layer), collected_from_now()
        output = run(args, kwargs)
        known = {id(value) for value in before}
        kept = [value for value in _attributes(layer) if id(value) not in known]
        kept += collected.tensors if collected is not None else []
        self._leaves = [_floats(output), [full_of(leaf) for leaf in _floats(kept) if leaf.requires_grad]]
        self.results, self.kept = ([leaf.detach() for leaf in leaves] for leaves in self._leaves)
        self._inputs = [(_OTHER if index else HIDDEN_STATES, leaf, False) for index, leaf in enumerate(given.leaves)]
        self._inputs += [(name, p, True) for name, p in layer.named_parameters() if p.requires_grad]
        self.gradients: list[Gradient] = []

    def backward(self) -> None:
        """Find the gradients of a weighted sum of all results; once."""
        results = [leaf for leaf in chain(*self._leaves) if leaf.requires_grad]
        inputs = [leaf for _, leaf, _ in self._inputs]
        # Neighbours have weights of both signs: what centers them or takes their mean does not cancel them.
        waves = [torch.arange(r.numel(), device=r.device).cos().view(r.shape).to(r.dtype) for r in results]
        found = torch.autograd.grad(results, inputs, waves, allow_unused=True) if results else [None] * len(inputs)
        for (name, leaf, is_of_parameter), gradient in zip(self._inputs, found, strict=True):
            value = torch.zeros(leaf.shape, dtype=leaf.dtype, device=leaf.device) if gradient is None else gradient
            self.gradients.append(Gradient(name, full_of(value).detach(), gradient is not None, is_of_parameter))
        self._leaves, self._inputs = [], []  # they hold the graph, and copies of the parameters


class _Arguments:
    """Copies of a layer's arguments, and those among them that have gradients."""

    def __init__(self, doubles: bool) -> None:
        self._doubles = doubles
        self._copies: dict[int, Tensor] = {}
        self.leaves: list[Tensor] = []

    def copy_of(self, value: Any) -> Any:
        """The arguments of the layer: one copy of a tensor that comes twice, no cache, which it would fill twice."""
        if not isinstance(value, Tensor):
            return None if is_cache(value) else value
        if id(value) not in self._copies:
            copy = _detached(value, doubles=self._doubles).clone()
            if value.is_floating_point() and (value.requires_grad or not self.leaves):
                self.leaves.append(copy.requires_grad_())
                copy = copy.clone()  # into a leaf, nothing may be written
            self._copies[id(value)] = copy
        return self._copies[id(value)]


def _attributes(layer: nn.Module) -> list[Any]:
    return [value for child in layer.modules() for value in vars(child).values()]


def _floats(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.is_floating_point()]

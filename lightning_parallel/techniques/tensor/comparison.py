"""A split layer against its unsplit self when it runs for the first time."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from lightning_parallel import _torch
from lightning_parallel.errors import ConfigurationError, check
from lightning_parallel.module.hidden_states import take_hidden
from lightning_parallel.module.layer_check import Difference, LayerCheck, Wording
from lightning_parallel.ranks.dtensors import local_of
from lightning_parallel.techniques.tensor.split_layer import SplitLayer

_REMEDY = "leave the maps concerned out of tensor_plan, or give sequence=False or tensor=1"


@_torch.modes.not_compiled
def check_layer(layer: nn.Module, split: SplitLayer, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """Compare the split layer with its unsplit self; choose what runs between its maps.

    Raises:
        ConfigurationError: If they differ either way, with where the difference begins.
    """
    if split.flow.is_checked and not _has_gradients(args, kwargs):
        split.flow.has_checked_gradients = True
        return
    region = split.region
    maps = _MapsRun(layer)
    wording = _wording(f"{split.path} ({type(layer).__name__})", maps)
    comparison = LayerCheck(
        layer,
        region.whole_arguments(args, kwargs),
        wording=wording,
        has_any=functools.partial(_has_any, split.flow.peers),
        group=split.flow.mesh.get_group(),
    )

    def run(args: Any, kwargs: Any) -> Any:
        maps.take()
        return split.run(layer, function, args, kwargs)

    try:
        error = comparison.run_whole(run, inside=functools.partial(_whole, layer, split))
        if comparison.whole is None:
            if error is not None and region.is_at_entry:
                raise error  # the code's own
            raise ConfigurationError(
                [f"{wording.name} cannot be compared with its unsplit self ({error or 'on another rank'}); {_REMEDY}"]
            )
        split.region = region.alone()
        with maps:
            check(_choose_flow(layer, split, comparison, run))
    finally:
        split.region = region
    split.flow.is_checked = True
    split.flow.has_checked_gradients = torch.is_grad_enabled()


def _has_gradients(args: Any, kwargs: Any) -> bool:
    """Whether a layer is given something beside hidden states that an evaluation would show no gradients of."""
    _, args, kwargs = take_hidden(args, kwargs)
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves((args, kwargs)))


def _has_any(peers: ProcessGroup, flag: bool) -> bool:
    """Whether any of the ranks has `flag`; they go on together, or not at all. An all-reduce."""
    found = torch.tensor(int(flag))
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=peers)
    return bool(found)


def _choose_flow(layer: nn.Module, split: SplitLayer, comparison: LayerCheck, run: Callable[..., Any]) -> list[str]:
    """Find what runs between the maps so that nothing changes. Returns why nothing does, or an empty list."""
    violations: list[str] = []
    of_gradients: list[str] = []
    for dim, is_local in itertools.product(_sequence_dims(layer, split), (True, False)):
        split.flow.is_local = is_local
        if split.lengths is not None:
            split.lengths.dim = dim
        violations = comparison.run_split(run)
        if not violations:
            return []
        of_gradients = of_gradients or (violations if comparison.has_equal_results else [])
    return of_gradients or violations


def _sequence_dims(layer: nn.Module, split: SplitLayer) -> Sequence[int]:
    """Dimensions of hidden states that may be the sequence, the likelier one first."""
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
    whole: dict[nn.Parameter, nn.Parameter] = {}  # what is tied stays tied
    try:
        for child in layer.modules():
            for name, parameter in list(child._parameters.items()):
                if isinstance(parameter, DTensor):
                    if parameter not in whole:
                        values = parameter.detach().redistribute(split.flow.mesh, [Replicate()]).to_local()
                        whole[parameter] = nn.Parameter(values, parameter.requires_grad)
                    child._parameters[name] = whole[parameter]
                    before.append((child, name, parameter))
        with split.unsplit():
            yield
    finally:
        for child, name, parameter in before:
            child._parameters[name] = parameter


# What users are told --------------------------------------------------------------------------------------------------


class _MapsRun:
    """The latest of a layer's split maps that has run, while this is open.

    Args:
        layer: The layer.
    """

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer
        self._latest = ""
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> None:
        for path, child in self._layer.named_modules():
            if isinstance(getattr(child, "weight", None), DTensor):
                self._handles.append(child.register_forward_hook(functools.partial(self._note, path)))

    def __exit__(self, *exception: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _note(self, path: str, linear: Any, args: Any, output: Any) -> None:
        given = args[0].shape if args and isinstance(args[0], Tensor) else ()
        part, whole = list(local_of(linear.weight).shape), list(linear.weight.shape)
        self._latest = f", behind {path} {list(given)} x {part} of {whole}"

    def take(self) -> str:
        """In words, behind which map the layer has come; empty if behind none. The next run begins anew."""
        latest, self._latest = self._latest, ""
        return latest


def _wording(name: str, maps: _MapsRun) -> Wording:
    return Wording(
        name,
        difference=lambda difference: _described(name, difference),
        failure=lambda error: [
            f"{name} fails when its linear maps are split over ranks{maps.take()}: {_first_line(error)}; {_REMEDY}"
        ],
        elsewhere=f"{name} differs on another rank when it is split; {_REMEDY}",
        apart=lambda place: (
            f"{name}: ranks do not do the same when its linear maps are split: this one has come to {place}, another "
            f"one has not, and would be waited for; {_REMEDY}"
        ),
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _described(name: str, difference: Difference) -> str:
    what = f"the gradient of {difference.name}" if difference.part == "gradient" else "its result"
    match difference.kind:
        case "number":
            return f"{name} has {difference.ours} results in place of {difference.whole} when it is split; {_REMEDY}"
        case "presence":
            found = "a" if difference.ours else "no"
            return f"{name} has {found} gradient of {difference.name} when it is split; {_REMEDY}"
        case "shape":
            shapes = f"{difference.ours} in place of {difference.whole}"
            return f"{name} computes {what} as {shapes} when it is split; {_REMEDY}"
        case "numbers":
            return (
                f"{name} computes something else when its linear maps are split: {what} differs by "
                f"{difference.error:.2g} where {difference.allowed:.2g} is allowed, from index {difference.index} on; "
                f"{_REMEDY}"
            )

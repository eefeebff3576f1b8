"""A split layer against its unsplit self, results and gradients, when it runs for the first time. Layer 2."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Replicate

from lightning_parallel import _torch
from lightning_parallel.errors import ConfigurationError
from lightning_parallel.module.layer_check import REMEDY, LayerProbe, probing
from lightning_parallel.techniques.tensor.split_layer import SplitLayer


@_torch.modes.not_compiled
def check_layer(layer: nn.Module, split: SplitLayer, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """Compare the split layer with its unsplit self; choose what runs between its maps.

    Raises:
        ConfigurationError: If they differ either way, with where the difference begins.
    """
    arguments = split.region.whole_arguments(args, kwargs)
    region, failure = split.region, ""
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
                if error is not None and split.region.is_at_entry:
                    raise error  # the code's own
                if whole is None:
                    failure = f"cannot be compared with its unsplit self ({error or 'on another rank'}); {REMEDY}"
                    break
                split.region = region.alone()
                failure = _choose_flow(layer, split, probe, whole)
                break
    finally:
        split.region = region
    if failure:
        raise ConfigurationError([f"{split.path} ({_torch.fsdp.class_name(layer)}) {failure}"])
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

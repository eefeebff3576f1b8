"""Reasons why a strategy cannot run on these devices or with this module: all at once, before anything starts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from lightning_parallel import _lightning
from lightning_parallel.parallelize import parallelized
from lightning_parallel.policies import LayerPolicies
from lightning_parallel.techniques.compiling import compile_violations
from lightning_parallel.techniques.deferred_init.deferral import unrecorded_meta_tensors
from lightning_parallel.techniques.deferred_init.record import InitRecord
from lightning_parallel.techniques.float8 import float8_violations
from lightning_parallel.techniques.recompute import recompute_violations
from lightning_parallel.techniques.sharding import is_sharded

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule
    from lightning.pytorch.strategies import Strategy


def device_violations(
    *, num_ranks: int, num_nodes: int, device_type: str, syncs_batchnorm: bool, backend: str | None
) -> list[str]:
    """Reasons that lie in the devices and in the arguments of the Trainer.

    Args:
        num_ranks: Devices times nodes.
        num_nodes: Number of machines.
        device_type: The type of the ranks' devices, such as ``"cuda"``.
        syncs_batchnorm: Whether ``sync_batchnorm=True`` was given.
        backend: The backend of the process group, if one was given.
    """
    found = []
    if dist.is_initialized() and dist.get_world_size() != num_ranks:
        found.append(
            f"devices x nodes = {num_ranks}, but this process already belongs to a group of {dist.get_world_size()} "
            f"ranks; give devices={dist.get_world_size() // num_nodes} or start a new process"
        )
    if syncs_batchnorm and device_type != "cuda":
        found.append(
            f"sync_batchnorm=True needs CUDA devices, but the device is {device_type}: torch's SyncBatchNorm has no "
            "other kernel; leave it out (statistics are then those of rank 0, as under DDP)"
        )
    if backend == "nccl" and device_type != "cuda":
        found.append(
            f"process_group_backend='nccl' needs CUDA devices, but the device is {device_type}; leave it out, or give "
            "'gloo'"
        )
    elif backend is not None and not dist.is_backend_available(backend.partition(":")[2] or backend):
        found.append(f"process_group_backend={backend!r} is not available here; leave it out, or give 'gloo'")
    return found


def module_violations(
    module: LightningModule, is_fitting: bool, record: InitRecord | None = None, *, sends_tensors: bool = False
) -> list[str]:
    """Reasons that lie in the module.

    Args:
        module: The user's module.
        is_fitting: Whether it is to be trained.
        record: The record of its initialisation, if `configure_model` was recorded.
        sends_tensors: Whether ranks send each other parameters.
    """
    found = packed_violations(module) if sends_tensors else []
    if is_fitting and not any(parameter.requires_grad for parameter in module.parameters()):
        count = sum(1 for _ in module.parameters())
        found.append(
            f"{type(module).__name__} has no trainable parameters ({count} parameters, all frozen); there is nothing "
            "to train: unfreeze some, or call validate, test or predict"
        )
    if made_on_meta := unrecorded_meta_tensors(module, record):
        found.append(
            f"{len(made_on_meta)} tensors of {type(module).__name__} are on the meta device and nobody knows their "
            f"values: {', '.join(made_on_meta[:6])}. Build these modules in configure_model (without "
            "torch.device('meta'): their initialisation is recorded there and replayed shard by shard)"
        )
    return found


def uninitialized_violations(module: nn.Module) -> list[str]:
    """Reasons that lie in lazy modules, whose parameters have no shape before their first forward.

    Args:
        module: The user's module.
    """
    tensors = chain(module.named_parameters(), module.named_buffers())
    names = [name for name, tensor in tensors if is_lazy(tensor)]
    if not names:
        return []
    return [
        f"{len(names)} tensors of {type(module).__name__} have no shape yet ({', '.join(names[:6])}): they belong to "
        "lazy modules, such as LazyLinear, which get it in their first forward, and nobody can send or cut them "
        "before. Call the module once with an example, in __init__ or in setup, or give the sizes (Linear in place of "
        "LazyLinear)"
    ]


def packed_violations(module: nn.Module) -> list[str]:
    """Reasons that lie in tensors that are made of others, such as weights in 8 bits: nobody can send or cut them.

    Args:
        module: The user's module.
    """
    tensors = chain(module.named_parameters(), module.named_buffers())
    # What torch.compile and others ask such tensors for, too. Shards of an earlier fit are ours.
    packed = {n: type(t) for n, t in tensors if hasattr(type(t), "__tensor_flatten__") and not isinstance(t, DTensor)}
    if not packed:
        return []
    kinds = sorted({f"{kind.__module__.partition('.')[0]}'s {kind.__name__}" for kind in packed.values()})
    names = ", ".join([*packed][:6])
    return [
        f"{len(packed)} tensors of {type(module).__name__} are packed ({', '.join(kinds)}): {names}. "
        "Their values cannot be sent to other ranks, cut or gathered; keep them in a dtype of torch (bf16 halves a "
        "frozen base), or train on one device under fsdp_custom"
    ]


def sharded_elsewhere_violations(strategy: object, module: nn.Module) -> list[str]:
    """Reasons that an earlier strategy left: a module that is still sharded, split or cut.

    Args:
        strategy: The strategy that needs it whole.
        module: The user's module.
    """
    if not _is_left_parallel(module):
        return []
    return [
        f"the module is still sharded by an earlier fit, which ended in an error, or it is too large to be whole in "
        f"the memory of one rank; {type(strategy).__name__} needs it whole. Use a sharding strategy, or start a new "
        "process from a checkpoint"
    ]


def _is_left_parallel(module: nn.Module) -> bool:
    # A module that is only cut into stages or split has no units of FSDP2.
    return is_sharded(module) or parallelized(module) is not None


def layer_policy_violations(policies: LayerPolicies, device: torch.device) -> list[str]:
    """Reasons that lie in the policies of layers, on this kind of device.

    Args:
        policies: The changes to each layer.
        device: This rank's device.
    """
    return [
        *recompute_violations(policies.recompute, compiles=policies.compile == "layers"),
        *compile_violations(policies.compile),
        *float8_violations(policies.float8, device),
    ]


@contextlib.contextmanager
def without_unmovable_module(strategy: Strategy) -> Iterator[None]:
    """Hide a module that cannot be moved from Lightning's teardown, which moves it to the host.

    A module that was refused on the meta device has no data, and the graph of a step that failed still refers to the
    shards. Moving either raises, and that error would hide the first one.
    """
    module = strategy.lightning_module
    if module is not None:
        is_unmade = any(tensor.is_meta for tensor in chain(module.parameters(), module.buffers()))
        if is_unmade or _is_left_parallel(module):
            _lightning.attach_module(strategy, None)
    yield
    _lightning.attach_module(strategy, module)

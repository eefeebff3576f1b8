"""Replication of tensors that every rank has whole: equal at the start, gradients averaged, buffers as under DDP."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from lightning_parallel import _torch
from lightning_parallel.ranks.collectives import all_reduced_together
from lightning_parallel.ranks.dtensors import local_of

_BUCKET_BYTES = 2**28


@torch.no_grad()
def synchronize_module(module: nn.Module, device: torch.device) -> None:
    """Give every rank the parameters and buffers of rank 0. A collective over all ranks.

    Without it, ranks that built the module from different seeds would each shard a different model. Tensors on the
    meta device are left out: they get equal values when they are made.

    Args:
        module: The module, on the host or on the device.
        device: The device of the process group; tensors elsewhere are copied to it and back, a bucket at a time.
    """
    if not _is_parallel():
        return
    tensors = [t.detach() for t in chain(module.parameters(), module.buffers()) if not t.is_meta]
    for bucket in _buckets(_torch.dense_parts.dense_parts(tensors)):
        travelling = [tensor.to(device) for tensor in bucket]
        _torch.groups.broadcast_tensors(travelling, source=0)
        for tensor, value in zip(bucket, travelling, strict=True):
            if value is not tensor:
                tensor.copy_(value)


@torch.no_grad()
def reduce_gradients(parameters: Sequence[nn.Parameter], group: ProcessGroup, host_group: ProcessGroup) -> None:
    """Average the gradients of `parameters`, which each rank holds whole, over `group`. A collective.

    A parameter that no rank used keeps no gradient; one that some ranks used counts as zero on the others. A sum may
    contain gradients that were averaged in an earlier microstep, because they are equal on all ranks and their mean is
    the same again.

    Args:
        parameters: The same parameters in the same order on every rank; one that is frozen now may still have an
            earlier gradient.
        group: The ranks that read different samples.
        host_group: These ranks, and maybe others that hold the same parameters and use them alike, for host memory.
    """
    if not parameters or group.size() == 1:
        return
    # Ranks may use different parameters, and a collective needs the same tensors on each: so they agree first, in host
    # memory, since reading flags from the device would wait for all that is queued there.
    used = torch.tensor([p.grad is not None for p in parameters], dtype=torch.uint8)
    dist.all_reduce(used, op=dist.ReduceOp.MAX, group=host_group)
    gradients = []
    for parameter, is_used in zip(parameters, used.tolist(), strict=True):
        if is_used:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(local_of(parameter.grad))
    for gradient, mean in zip(gradients, all_reduced_together(gradients, group, divisor=group.size()), strict=True):
        gradient.copy_(mean)


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    for tensor in tensors:
        bucket.append(tensor)
        if sum(t.numel() * t.itemsize for t in bucket) >= _BUCKET_BYTES:
            yield bucket
            bucket = []
    if bucket:
        yield bucket


def _is_parallel() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1

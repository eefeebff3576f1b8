"""Callbacks that thaw parts of a module whose stages hold parameters that others do not have."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from lightning_parallel.module.placeholders import is_placeholder
from lightning_parallel.ranks.dtensors import local_of
from lightning_parallel.ranks.host_reads import HostReads

_LEFT_OUT = (
    "{number} of {total} parameters that are to join an optimizer are in it already, or have the values of one that "
    "is, and are left out, as in one process; in configure_optimizers, give it those that require gradients alone"
)


@contextlib.contextmanager
def thawed_ones_found(world: ProcessGroup, stages: ProcessGroup, reads: HostReads) -> Iterator[None]:
    """Inside this context, `BaseFinetuning` knows which parameters of other stages an optimizer has.

    It compares values (`filter_on_optimizer`), and thaws nothing that equals what the optimizer has. All ranks have to
    decide alike, so they tell each other what they hold.

    Args:
        world: All ranks, for host memory.
        stages: The ranks of this rank's pipeline, for host memory.
        reads: Refuses what only some ranks come to.
    """
    own = BaseFinetuning.__dict__["filter_on_optimizer"]
    gather = functools.partial(reads.gather, "BaseFinetuning.filter_on_optimizer", group=world)
    first = dist.get_process_group_ranks(stages)[0]
    found = functools.partial(_not_in, gather, first)
    BaseFinetuning.filter_on_optimizer = staticmethod(found)  # type: ignore[method-assign]
    try:
        yield
    finally:
        BaseFinetuning.filter_on_optimizer = own  # type: ignore[method-assign]


def _not_in(
    gather: Callable[[Any], list[Any]], first_stage: int, optimizer: Optimizer, params: Iterable[nn.Parameter]
) -> list[nn.Parameter]:
    """Those of `params` that no parameter of the optimizer equals. A collective of all ranks."""
    given = list(params)
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    own = [None if is_placeholder(each) else _digest_of(each) for each in (*given, *held)]
    of_pipelines: dict[int, list[Any]] = {}
    for pipeline, of_rank in gather((first_stage, own)):
        known = of_pipelines.setdefault(pipeline, of_rank)
        of_pipelines[pipeline] = [one or other for one, other in zip(known, of_rank, strict=True)]
    values = list(zip(*of_pipelines.values(), strict=True))  # of each parameter, the parts that pipelines have of it
    in_use = set(values[len(given) :])
    found = [parameter for parameter, value in zip(given, values, strict=False) if value not in in_use]
    if len(found) < len(given):
        rank_zero_warn(_LEFT_OUT.format(number=len(given) - len(found), total=len(given)))
    return found


def _digest_of(parameter: Tensor) -> tuple[object, ...]:
    values = local_of(parameter.detach()).cpu().contiguous()
    data = values.reshape(-1).view(torch.uint8).numpy().data
    return tuple(parameter.shape), str(parameter.dtype), hashlib.sha256(data).hexdigest()

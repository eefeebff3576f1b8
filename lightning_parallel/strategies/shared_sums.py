"""Collectives over all ranks that user code begins where several ranks read the same samples: these count each time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.distributed import ProcessGroup

from lightning_parallel import _torch
from lightning_parallel.errors import line_of_user
from lightning_parallel.ranks.host_reads import at
from lightning_parallel.strategies.step_meetings import module_that_asks

_COLLECTING = ("all_reduce", "reduce", "all_gather", "gather", "all_to_all")
"""Beginnings of names of collectives whose results grow with the number of ranks."""
_GROWING = (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT)
_TOLD = (
    "torch.distributed.{name}() {at} asks all {ranks} ranks, of which {times} at a time read the same samples: a mean "
    "over ranks is that of one process, but sums, products and lists have each sample {times} times. self.all_gather, "
    "self.trainer.strategy.reduce, self.log(..., sync_dist=True) and metrics ask one of these ranks only; or "
    "give the collective group=self.trainer.strategy.data_group"
)


@contextmanager
def shared_sums_told(num_readers: int) -> Iterator[None]:
    """Inside this context, the first collective of each line of user code that counts samples repeatedly is told.

    Args:
        num_readers: The number of ranks that read different samples, fewer than there are.
    """
    num_ranks, told = dist.get_world_size(), set[str]()

    def check(name: str, group: ProcessGroup | None, op: object) -> None:
        is_growing = name.startswith(_COLLECTING) and (op is None or op in _GROWING)
        if not is_growing or dist.get_world_size(group) != num_ranks or not _is_of_user(module_that_asks()):
            return
        if (line := line_of_user()) not in told:
            told.add(line)
            rank_zero_info(_TOLD.format(name=name, at=at(line), ranks=num_ranks, times=num_ranks // num_readers))

    with _torch.groups.collectives_checked(check):
        yield


def _is_of_user(module: str) -> bool:
    """Whether a module of this name is none of those that know which ranks share samples."""
    return module.partition(".")[0] not in _KNOWING


_KNOWING = ("torch", "torchmetrics", "lightning", "lightning_fabric", "lightning_parallel")

"""Parameters that have a gradient, and those that have none: zeros are one, by which weight decay moves a parameter."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_parallel.module.differences import first_of


def presence_differences(
    ours: Mapping[str, Tensor],
    trained: Collection[str],
    used: Collection[str],
    device: torch.device,
    group: ProcessGroup | None,
) -> list[str]:
    """Parameters that have a gradient where one process has none, and those that lack one, in words. A collective.

    Args:
        ours: Name -> parameter, of those that this rank has.
        trained: Names of all that are trained, in one order on all ranks.
        used: Names of those that have a gradient on this rank's samples in one process.
        device: This rank's device, whose memory its process groups send.
        group: The ranks that read different samples; ``None`` for one process.
    """
    flags = torch.tensor([name in used for name in trained], dtype=torch.uint8, device=device)
    if group is not None and group.size() > 1:
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
    expected = dict(zip(trained, map(bool, flags.tolist()), strict=True))
    has = {name: ours[name].grad is not None for name in trained if name in ours}
    extra = [name for name, own in has.items() if own and not expected[name]]
    missing = [name for name, own in has.items() if not own and expected[name]]
    of_all = f"of {len(trained)} parameters"
    found = []
    if extra:
        found.append(f"{len(extra)} {of_all} have a gradient where one process has none: {first_of(extra)}")
    if missing:
        found.append(f"{len(missing)} {of_all} have no gradient where one process has one: {first_of(missing)}")
    return found

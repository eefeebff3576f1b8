"""Lock step for ranks that have different numbers of batches."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.distributed as dist


class PredictionLockStep:
    """Tell after which batch this rank has to run one more, because another rank has one more.

    Lightning repeats no sample in prediction, so ranks may differ by a batch; a sharded module gathers its parameters
    on all ranks or on none. Making the object is a collective.

    Args:
        counts: This rank's number of batches of each loader.
        device: This rank's device.
    """

    def __init__(self, counts: Sequence[int | float], device: torch.device) -> None:
        own = torch.tensor(counts, dtype=torch.float64, device=device)
        most = own.clone()
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        ends = accumulate(counts)
        self._short_ends = {end for end, is_short in zip(ends, (own < most).tolist(), strict=True) if is_short}
        self._done = 0

    def is_short_after_this(self) -> bool:
        """Call once a batch. True if it was the last of a loader that has one more batch on another rank."""
        self._done += 1
        return self._done in self._short_ends

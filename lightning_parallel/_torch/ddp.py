"""DistributedDataParallel: private or version-dependent names of torch."""

from __future__ import annotations

import re

from torch.nn.parallel import DistributedDataParallel

_INDICES = re.compile(r"did not receive grad for rank \d+: ((?:\d+ ?)+)")


def unreduced_indices(wrapped: DistributedDataParallel) -> list[int] | None:
    """Numbers of the parameters for which the last backward leaves DDP waiting; ``None`` if it waits for none.

    DDP says so by itself only when the next forward begins. `DistributedDataParallel._check_reducer_finalized`, since
    2.2; no public spelling. Without any numbers in its words the list is empty.
    """
    try:
        wrapped._check_reducer_finalized()
    except RuntimeError as error:
        found = _INDICES.search(str(error))
        return [int(index) for index in found[1].split()] if found else []
    return None

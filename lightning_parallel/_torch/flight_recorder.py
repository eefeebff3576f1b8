"""Torch's flight recorder: the collectives that this process has begun, and which of them nobody has completed."""

from __future__ import annotations

import pickle
from typing import Any, NamedTuple

from torch._C import _distributed_c10d as c10d

_DUMPS = ("_dump_nccl_trace", "_dump_fr_trace")
"""Of NCCL, since 2.3, where torch was built with it; of gloo and others, seen in 2.13 and 2.15."""


class Pending(NamedTuple):
    """A collective that waits for other ranks.

    Args:
        name: Such as ``"all_reduce"``.
        group: The name of its group, which all of its ranks share.
        number: Its place among the collectives of that group, or among its sends and receives.
        shapes: Of what it was given.
        began: Nanoseconds since 1970.
    """

    name: str
    group: str
    number: int
    shapes: list[list[int]]
    began: int


def pending() -> list[Pending]:
    """The collectives that have begun and not ended, the oldest first; none where the recorder is off.

    Its entries are those of the last 2000 collectives (`TORCH_FR_BUFFER_SIZE`; 0 switches it off). Under gloo, where
    nothing notes the end of a collective, they are retired; under NCCL, a thread of torch's does both. There is no
    public spelling.
    """
    found: list[Pending] = []
    for name in _DUMPS:
        if (dump := getattr(c10d, name, None)) is not None:
            entries = pickle.loads(dump(includeStackTraces=False)).get("entries", ())
            found += [_read(entry) for entry in entries if not entry.get("retired") and entry["state"] != "completed"]
    return sorted(found, key=lambda each: each.began)


def _read(entry: dict[str, Any]) -> Pending:
    number = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
    name = entry["profiling_name"].partition(":")[2] or entry["profiling_name"]
    return Pending(name, str(entry["process_group"][0]), number, entry["input_sizes"], entry["time_created_ns"])

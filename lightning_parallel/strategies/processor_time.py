"""The processor time of this process and its children: what tells a rank that computes from one that waits."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path


def processor_seconds() -> float:
    """Seconds that all threads of this process have computed, and those of its children, such as workers of a loader.

    Children are found where there is Linux's ``/proc``; elsewhere they count as if they did nothing.
    """
    return time.process_time() + sum(map(_of_child, _children()))


def _children() -> list[str]:
    found: list[str] = []
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread that has ended meanwhile
            found += path.read_text().split()
    return found


def _of_child(pid: str) -> float:
    try:
        # Behind the name, which may hold anything, `utime` and `stime` are the 12th and 13th field.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / float(os.sysconf("SC_CLK_TCK"))

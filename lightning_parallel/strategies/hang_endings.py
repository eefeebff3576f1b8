"""The end of a run that hangs: stacks are written, one rank prints why, and all processes end at the same time."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import sys
import time
from os import _exit as end_at_once
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import torch.distributed as dist

from lightning_parallel import _lightning, _torch

if TYPE_CHECKING:
    from collections.abc import Sequence

_LATEST = 15.0
"""Seconds that ranks have for hearing that the run ends, and for writing their stacks."""
_SOON = 0.05
_TOGETHER = 0.5
"""Seconds behind the message in which all ranks get ready to end at the same time."""


def name_of(key: str, *parts: object) -> str:
    """The name of an entry in the store of ranks.

    Args:
        key: Its beginning.
        parts: The rest.
    """
    return "/".join(map(str, (key, *parts)))


def end_together(store: dist.Store, key: str, rank: int, ranks: Sequence[int], words: str, folder: Path) -> NoReturn:
    """End this process, with its children, and with exit status 1; from another thread than the one that waits.

    Args:
        store: What ranks tell each other in.
        key: Beginning of their names.
        rank: This one.
        ranks: Those that call this too, of which the first prints why.
        words: Why.
        folder: Where the stacks are to be written.
    """
    problem, told, at = _write_stacks(folder, rank), name_of(key, "told"), 0.0
    with contextlib.suppress(RuntimeError):  # the store is gone where rank 0 is, and has told
        store.set(name_of(key, "written", rank), "")
        if rank == ranks[0]:
            _wait_for(store, [name_of(key, "written", each) for each in ranks])
            sys.stdout.flush()
            write(f"lightning_parallel: {words}{problem}")
            store.set(told, str(time.time() + _TOGETHER))
        if _wait_for(store, [told]):
            at = float(store.get(told))
    if len(ranks) < dist.get_world_size():
        _lightning.signals.end_children()
    _end(at)


def end_alone(rank: int, words: str, folder: Path) -> NoReturn:
    """End this process, as `end_together` does, where no other rank can be told.

    Args:
        rank: This one.
        words: Why.
        folder: Where its stacks are to be written.
    """
    problem = _write_stacks(folder, rank)
    sys.stdout.flush()
    write(f"lightning_parallel: {words}{problem}")
    _lightning.signals.end_children()
    _end(0.0)


def _end(at: float) -> NoReturn:
    _lightning.signals.leave_children()
    for child in multiprocessing.active_children():
        if child.daemon:  # workers of loaders; they may be what is stuck
            child.kill()
    # All at once: where another process is gone, gloo would throw what nobody catches.
    time.sleep(max(0.0, min(_TOGETHER, at - time.time())))
    end_at_once(1)  # nothing else ends a thread that waits in a collective


def write(words: str) -> None:
    """Write `words` where errors go."""
    sys.stderr.write(f"\n{words}\n")
    sys.stderr.flush()


def _wait_for(store: dist.Store, names: list[str]) -> bool:
    """Whether these entries are there soon."""
    end = time.monotonic() + _LATEST
    while not store.check(names):
        if time.monotonic() > end:
            return False
        time.sleep(_SOON)
    return True


def _write_stacks(folder: Path, rank: int) -> str:
    """Write open collectives and the stacks of all threads; what went wrong, "" if nothing did."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"hang_rank{rank}.txt").open("w") as file:
            for each in _torch.flight_recorder.pending():
                file.write(f"waits for {each}\n")
            file.flush()
            faulthandler.dump_traceback(file)
    except OSError as error:
        return f" They could not be written: {error}"
    return ""

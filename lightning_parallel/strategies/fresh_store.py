"""A store in which ranks meet without what ranks before them have left there."""

from __future__ import annotations

import os
import secrets
import time
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed import Store

_KEY = "lightning_parallel/meeting"
_POLL = 0.005


def is_store_kept() -> bool:
    """Whether the store of these ranks is one of torchrun's, which is there before and after them.

    Ranks that torchrun starts again find in it what those before them have said, and connect to addresses where nobody
    is any more (pytorch/pytorch#135712).
    """
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def fresh_store(rank: int, size: int, timeout: timedelta) -> Store:
    """The store that environment variables name, with names that no earlier ranks have used. A collective.

    Args:
        rank: This one.
        size: The number of ranks.
        timeout: How long to wait for the others.

    Raises:
        RuntimeError: If not all ranks have come by then.
    """
    store, *_ = next(dist.rendezvous("env://", rank, size, timeout=timeout))  # type: ignore[attr-defined]
    return dist.PrefixStore(agreed_name(store, rank, size, timeout), store)


def agreed_name(store: Store, rank: int, size: int, timeout: timedelta) -> str:
    """A name that all ranks of this start of the run have, and those of none before. A collective.

    How often ranks were started is none: each agent of torchrun counts for itself. So each rank asks by a word that
    nobody else has, and rank 0 answers with its own.

    Args:
        store: With or without what earlier ranks have said.
        rank: This one.
        size: The number of ranks.
        timeout: How long to wait for the others.

    Raises:
        RuntimeError: If not all ranks have come by then.
    """
    own = f"{_KEY}/{secrets.token_hex(8)}"
    if rank != 0:
        store.set(f"{_KEY}/{rank}", own)
        store.wait([f"{own}/answer"], timeout)
        name = store.get(f"{own}/answer").decode()
        store.add(f"{name}/heard", 1)
        return name
    end = time.monotonic() + timeout.total_seconds()
    while store.add(f"{own}/heard", 0) < size - 1:
        if time.monotonic() > end:
            raise RuntimeError(f"after {timeout} not all of {size} ranks have come; look for errors of the others")
        for other in range(1, size):
            if store.check([asked := f"{_KEY}/{other}"]):  # by an earlier rank, perhaps, whom an answer does no harm
                store.set(f"{store.get(asked).decode()}/answer", own)
        time.sleep(_POLL)
    return own

"""A hang in words: whether ranks that stand still wait for each other for ever, who is missing where, and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lightning_parallel.strategies.rank_places import READS, SAVES, Place

_ENDS_AT = "The run ends, with exit status 1; hang_timeout sets after how long, and hang_timeout=0 switches this off"


class Standing(NamedTuple):
    """The answer of a rank to the question where it is.

    Args:
        place: Where; ``None`` if it has not answered.
        seconds: For how long it has been there without having computed anything.
        is_stuck: Whether that is longer than it may be.
        has_left: Whether it is done with the run.
    """

    place: Place | None = None
    seconds: float = 0.0
    is_stuck: bool = False
    has_left: bool = False

    @property
    def awaited(self) -> str:
        """The collective that it waits in; ``""`` for none."""
        return "" if self.place is None else self.place.collective

    @property
    def words(self) -> str:
        """The place in words, to follow the name of a rank."""
        if self.place is None:
            return "has left the run" if self.has_left else f"does not answer: its process has ended, or {_HOLDS}"
        waits = f"waits for {self.awaited}" if self.awaited else "waits for no other rank"
        return f"{waits}; {self.place.words}"


_HOLDS = "is in a call that keeps Python's lock, or its machine cannot be reached"


def is_hang(standings: Sequence[Standing]) -> bool:
    """Whether some ranks wait in a collective, others elsewhere or not at all, and nobody can ever come.

    A rank that computes, or has been where it is for a short time, may come. Ranks that all wait in the same collective
    have a slow network; ranks that wait in none have slow data, or a debugger has stopped one.

    Args:
        standings: That of each rank.
    """
    if not all(each.is_stuck for each in standings):
        return False
    if any(each.place is not None and each.place.is_debugged for each in standings):
        return False
    awaited = {each.awaited for each in standings}
    return len(awaited) > 1


def hang_words(standings: Sequence[Standing], seconds: float, stacks: str) -> str:
    """The message that ends a run.

    Args:
        standings: That of each rank.
        seconds: For how long no rank has moved.
        stacks: Where the stacks are.
    """
    return (
        f"this run hangs: no rank has moved for {seconds:.0f} seconds, and some wait for others that do not come.\n"
        f"{_listed(standings)}\n{_advice(standings)}\nThe stacks are in {stacks}. {_ENDS_AT}."
    )


def slow_words(standings: Sequence[Standing], seconds: float) -> tuple[str, str]:
    """The warning for ranks that stand still and may go on, and its kind; empty where there is nothing to say.

    Args:
        standings: That of each rank.
        seconds: For how long one has not moved.
    """
    if any(each.place is not None and each.place.is_debugged for each in standings):
        return "", ""
    moving = [str(rank) for rank, each in enumerate(standings) if not each.is_stuck]
    if moving:
        kind, why = "waits", f"a rank waits for others, and of them rank {', '.join(moving)} may come"
    elif not standings[0].awaited:
        kind, why = "still", "no rank has moved, and none waits for another"
    else:
        kind, why = "network", "all ranks wait for the same: the network is slow, or gone"
    return kind, f"{why}; this lasts {seconds:.0f} seconds by now, and the run goes on.\n{_listed(standings)}"


def silence_words(rank: int, place: Place, seconds: float, stacks: str) -> str:
    """The message of a rank that is cut off from where ranks meet.

    Args:
        rank: This one.
        place: Where it is.
        seconds: For how long nothing has come from there, and this rank has not moved.
        stacks: Where its stacks are.
    """
    return (
        f"rank {rank} is cut off: the store in which ranks meet, on the machine of rank 0, has not answered for "
        f"{seconds:.0f} seconds, in which this rank has not moved.\n  rank {rank} {Standing(place).words}\n"
        f"Look at the network between the machines, and at that machine: whether it runs, and what its ranks wrote "
        f"last. A resumed run goes on from the last checkpoint.\nThe stacks are in {stacks}. This rank ends, with exit "
        f"status 1; hang_timeout sets after how long, and hang_timeout=0 switches this off."
    )


def _listed(standings: Sequence[Standing]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, each in enumerate(standings):
        ranks.setdefault(each.words, []).append(rank)
    return "\n".join(
        f"  rank {ranks_there[0]} {words}"
        if len(ranks_there) == 1
        else f"  each of ranks {', '.join(map(str, ranks_there))} {words}"
        for words, ranks_there in ranks.items()
    )


def _advice(standings: Sequence[Standing]) -> str:
    places = [each.place for each in standings if each.place is not None]
    saving = [place.doing == SAVES for place in places]
    if any(each.place is None for each in standings):
        return (
            "A rank is gone: look at the end of its output, whether all ranks leave the run at the same place, and at "
            "the network to its machine."
        )
    if any(place.doing == READS and not place.collective for place in places):
        return (
            "A rank waits for its data: look at what its dataset reads at that line (a file system, a download, a "
            "lock), at its workers, and try num_workers=0, with which the stack shows where."
        )
    if any(not place.collective for place in places):
        return (
            "A rank waits for no other: look at what it does at that line (it waits for a file, a lock, a download, a "
            "process). What only some ranks do has to take less than hang_timeout, or is better done before the run."
        )
    if any(saving) and not all(saving):
        return (
            "A checkpoint needs all ranks: call trainer.save_checkpoint on all of them, outside of conditions such as "
            "`if self.global_rank == 0:`; rank 0 alone writes the file."
        )
    return (
        "Usual reasons: a collective (self.all_gather, strategy.barrier, self.log(sync_dist=True), validation) that "
        "only some ranks run, as behind `if self.global_rank == 0:`; or a condition on values that differ between "
        "ranks. Call it on all ranks, and decide by values that all have, such as self.global_step."
    )

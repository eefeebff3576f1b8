"""Evaluation in lock step: a rank that has run out of batches takes part in the steps of those that have more."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.distributed import ProcessGroup

from lightning_parallel import _lightning
from lightning_parallel.module.kept_state import KeptState
from lightning_parallel.ranks.lock_step import said_by_all
from lightning_parallel.ranks.objects import of_all_ranks
from lightning_parallel.ranks.random_streams import unchanged_generators
from lightning_parallel.strategies.loader_lengths import (
    ADVICE,
    empty_violations,
    has_exact_length,
    named,
    uneven_sharers,
)
from lightning_parallel.strategies.step_logs import StepLogs
from lightning_parallel.strategies.step_meetings import meetings_refused

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

END = _lightning.fetchers.END


class _Ahead(Protocol):
    """Knows from which loader the next batch of each rank comes."""

    def pass_batch(self) -> None:
        """Note that all ranks have run a step."""

    def parts(self) -> list[int]:
        """The index of the loader from which the next batch of each rank comes; `END` if it has none."""


class _Counted:
    """All ranks know how many batches each of them has.

    Args:
        counts: Of each rank, its number of batches of each loader.
    """

    def __init__(self, counts: Sequence[Sequence[float]]) -> None:
        self._counts, self._part, self._done = counts, 0, 0

    def pass_batch(self) -> None:
        self._done += 1

    def parts(self) -> list[int]:
        if not any(self._done < own[self._part] for own in self._counts):
            further = [part for part in range(self._part + 1, len(self._counts[0])) if self._has_any(part)]
            self._part, self._done = (further[0], 0) if further else (len(self._counts[0]) - 1, self._done)
        return [self._part_of(own) for own in self._counts]

    def _has_any(self, part: int) -> bool:
        return any(own[part] for own in self._counts)

    def _part_of(self, own: Sequence[float]) -> int:
        if self._done < own[self._part]:
            return self._part
        return next((part for part in range(self._part + 1, len(own)) if own[part]), END)


class _Told:
    """Ranks tell each other before each batch. A collective then.

    Args:
        next_part: This rank's.
        group: All ranks, for host memory.
    """

    def __init__(self, next_part: Callable[[], int], group: ProcessGroup) -> None:
        self._next_part, self._group = next_part, group

    def pass_batch(self) -> None:
        """Do nothing: a rank looks ahead when it is asked."""

    def parts(self) -> list[int]:
        return said_by_all(self._next_part(), self._group)


class EvaluationTurns:
    """Runs the steps of one evaluation in turns, one for a batch of each rank. Making it is a collective.

    Args:
        loop: Lightning's loop, which has set up its fetcher.
        group: All ranks, for host memory.
        readers: Of each rank, its place among those that read different samples.
        refuse: Raises with violations, if there are any, which are the same on all ranks.
        meets: Whether steps need all ranks, so that one without a batch runs its last one again.
    """

    def __init__(
        self,
        loop: Any,
        group: ProcessGroup,
        readers: Sequence[int],
        refuse: Callable[[list[str]], None],
        *,
        meets: bool,
    ) -> None:
        self._rank, self._readers, self._refuse, self._group = group.rank(), readers, refuse, group
        self._loop, self._meets, self._part = loop, meets, 0
        self._again: Callable[[], None] | None = None
        self._refusal = contextlib.ExitStack()
        self.are_uneven = False
        self._ahead = self._looking_ahead()
        if self._ahead is not None:
            self._begin(self._ahead.parts())
            _lightning.fetchers.set_end_of_batch(loop, self.finish)

    def _looking_ahead(self) -> _Ahead | None:
        """Where the next batches come from; ``None`` where ranks have as many of each loader, and need not ask."""
        loop = self._loop
        counts = _lightning.fetchers.evaluation_counts(loop)
        is_exact = all(map(has_exact_length, _lightning.fetchers.loaders_of(loop)))
        said = of_all_ranks((counts, is_exact))
        are_known = all(exact for _, exact in said)
        if are_known and all(each == counts for each, _ in said):
            return None
        if _lightning.fetchers.gives_iterator(loop):
            # The step reads its batches by itself: it cannot be run with one that it has not read.
            _lightning.fetchers.read_evaluation_through(loop, self._ending_together)
            return None
        if are_known:
            return _Counted([each for each, _ in said])
        return _Told(_lightning.fetchers.BatchesAhead(loop).next_part, self._group)

    def _ending_together(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches of this rank, up to where the first rank has none left. A collective, batch by batch."""
        while True:
            batch = next(batches, None)
            has = [bool(each) for each in said_by_all(int(batch is not None), self._group)]
            self._refuse(uneven_sharers(has, self._readers))
            if not all(has):
                if any(has):
                    rank_zero_warn(_ITERATOR.format(_without(has)))
                return
            yield batch

    def note(self, again: Callable[[], None]) -> None:
        """Note that a step has run, which `finish` ends once its hooks have run, too.

        Args:
            again: Runs the step once more with the same batch, so that nothing remains of it.
        """
        self._again = again

    def finish(self) -> None:
        """End a step that was noted, if there is one. A collective, where ranks ask or others have more batches."""
        again, self._again = self._again, None
        if self._ahead is None or again is None or sys.exc_info()[0] is not None:
            return
        self._ahead.pass_batch()
        parts = self._ahead.parts()
        while any(has := self._have(parts)) and not has[self._rank]:
            if self._meets:
                with meetings_refused(_without(has)):
                    again()
            self._ahead.pass_batch()
            parts = self._ahead.parts()
        self._refusal.close()
        self.are_uneven = any(has) and not all(has)
        if self.are_uneven:
            # Till the next step has ended with its hooks: ranks that have no batch call none of these.
            self._refusal.enter_context(meetings_refused(_without(has)))
        elif not any(has):
            self._begin(parts)

    def _have(self, parts: Sequence[int]) -> list[bool]:
        """Whether each rank has another batch of this loader."""
        has = [part == self._part for part in parts]
        self._refuse(uneven_sharers(has, self._readers))
        return has

    def _begin(self, parts: Sequence[int]) -> None:
        self._part = min(parts)
        self._refuse(uneven_sharers(parts, self._readers))
        self._refuse(empty_violations([part != self._part for part in parts], f"of loader {self._part}"))

    def close(self) -> None:
        """Give the loop back as it was, after its end or an error."""
        self._refusal.close()
        _lightning.fetchers.set_end_of_batch(self._loop, None)


@contextlib.contextmanager
def nothing_left(module: LightningModule, device: torch.device) -> Iterator[None]:
    """Inside this context, a step logs nothing, and nothing remains of it: no metric counts its samples.

    Args:
        module: The module.
        device: This rank's device, whose random numbers are drawn as if there had been no step.
    """
    kept = KeptState(module)
    with unchanged_generators(device), StepLogs(module).of(0):
        yield
    kept.restore()


def _without(has: Sequence[bool]) -> str:
    return named([rank for rank, each in enumerate(has) if not each])


_ITERATOR = (
    "the evaluation ends on all ranks where {} came to an end, since a step that takes dataloader_iter reads its "
    f"batches by itself; what other ranks have left is read by nobody. {ADVICE}"
)

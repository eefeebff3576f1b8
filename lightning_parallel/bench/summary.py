"""Repeats of a cell as one: medians with their spread, rates, and what scaling has won."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Protocol, Self

from lightning_parallel.bench.cells import BASE, Cell
from lightning_parallel.bench.processes import RAN


class _Repeat(Protocol):
    """The part of a result that is summarised."""

    @property
    def outcome(self) -> str: ...
    @property
    def reason(self) -> str: ...
    @property
    def seconds(self) -> float | None: ...
    @property
    def samples(self) -> int | None: ...
    @property
    def tokens(self) -> int | None: ...
    @property
    def memory_bytes(self) -> int | None: ...
    @property
    def collectives(self) -> Mapping[str, Sequence[int]] | None: ...


@dataclass(frozen=True)
class Summary:
    """One cell.

    Args:
        cell: The cell.
        outcome: ``"ran"``, ``"refused"``, ``"ended"``, or ``""`` where no run is done yet.
        reason: Why it did not run, or why collectives were not counted.
        repeats: The number of repeats that ran.
        seconds: The median of a step.
        fastest: The shortest.
        slowest: The longest.
        samples: Of a step, over all ranks.
        samples_per_second: By the median.
        tokens_per_second: Likewise; ``None`` where batches have none.
        memory_bytes: The median of the peaks.
        collectives: Kind -> calls of a step and their bytes.
        efficiency: Samples per second and device, as a share of those of the same row on the smallest number of
            devices; ``None`` where the row has not run there.
    """

    cell: Cell
    outcome: str
    reason: str = ""
    repeats: int = 0
    seconds: float | None = None
    fastest: float | None = None
    slowest: float | None = None
    samples: int | None = None
    samples_per_second: float | None = None
    tokens_per_second: float | None = None
    memory_bytes: int | None = None
    collectives: Mapping[str, Sequence[int]] | None = None
    efficiency: float | None = None

    @property
    def rate_per_device(self) -> float:
        """Samples per second and device."""
        return (self.samples_per_second or 0.0) / self.cell.devices

    def to_plain(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self.cell), **{name: value for name, value in asdict(self).items() if name != "cell"}}

    @classmethod
    def of_plain(cls, found: Mapping[str, Any]) -> Self:
        """Read what `to_plain` has written."""
        names = {each.name for each in fields(Cell)}
        cell = Cell(**{name: value for name, value in found.items() if name in names})
        return cls(cell, **{name: value for name, value in found.items() if name not in names})


def summarised(cells: Sequence[Cell], repeats: Sequence[Sequence[_Repeat]]) -> list[Summary]:
    """The summaries of all cells, with efficiencies.

    Args:
        cells: The cells.
        repeats: The results of each.
    """
    found = [_summary(cell, own) for cell, own in zip(cells, repeats, strict=True)]
    bases = {each.cell.row: each for each in found if each.cell.scaling == BASE and each.outcome == RAN}
    return [
        Summary(**{**vars(each), "efficiency": each.rate_per_device / bases[each.cell.row].rate_per_device})
        if each.outcome == RAN and each.cell.row in bases
        else each
        for each in found
    ]


def _summary(cell: Cell, repeats: Sequence[_Repeat]) -> Summary:
    ran = [each for each in repeats if each.outcome == RAN]
    if not ran:
        return Summary(cell, repeats[-1].outcome, repeats[-1].reason) if repeats else Summary(cell, "")
    seconds = [float(each.seconds or 0.0) for each in ran]
    middle = statistics.median(seconds)
    samples, tokens = ran[-1].samples or 0, ran[-1].tokens
    counted = [each.collectives for each in ran if each.collectives is not None]
    return Summary(
        cell,
        RAN,
        next((each.reason for each in repeats if each.reason), ""),
        repeats=len(ran),
        seconds=middle,
        fastest=min(seconds),
        slowest=max(seconds),
        samples=samples,
        samples_per_second=samples / middle,
        tokens_per_second=None if tokens is None else tokens / middle,
        memory_bytes=int(statistics.median(each.memory_bytes or 0 for each in ran)),
        collectives=counted[-1] if counted else None,
    )

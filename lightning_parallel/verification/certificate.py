"""The result of a verification, for people and for programs."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import metadata

EQUAL, DIFFERS, SKIPPED = "equal", "differs", "not compared"
_PACKAGES = ("lightning-parallel", "torch", "lightning", "torchmetrics")


@dataclass(frozen=True)
class Finding:
    """One comparison.

    Args:
        subject: The things that were compared.
        outcome: ``"equal"``, ``"differs"`` or ``"not compared"``.
        detail: Numbers, names, or the reason.
    """

    subject: str
    outcome: str
    detail: str


@dataclass(frozen=True)
class Certificate:
    """The comparisons of one verification, and what was verified.

    Args:
        strategy: As it was given.
        num_ranks: The number of ranks.
        num_readers: How many of them read different samples.
        num_updates: The number of updates.
        precision: The precision of both runs.
        tolerance: The largest relative difference that counts as equal.
        findings: The comparisons.
    """

    strategy: str
    num_ranks: int
    num_readers: int
    num_updates: int
    precision: str
    tolerance: float
    findings: tuple[Finding, ...]
    versions: dict[str, str] = field(default_factory=lambda: _versions())
    day: str = field(default_factory=lambda: datetime.now(UTC).date().isoformat())

    @property
    def has_passed(self) -> bool:
        """Whether nothing differs, and something was compared."""
        outcomes = {finding.outcome for finding in self.findings}
        return EQUAL in outcomes and DIFFERS not in outcomes

    def to_json(self) -> str:
        """As an object of JSON."""
        return json.dumps({"passed": self.has_passed, **asdict(self)}, indent=2)

    def to_text(self) -> str:
        """As a table with a line for each comparison, and one for the result."""
        readers = f"{self.num_readers} read different samples" if self.num_readers > 1 else "all read the same samples"
        width = max((len(finding.subject) for finding in self.findings), default=0)
        lines = [
            f"{self.strategy} on {self.num_ranks} ranks of the CPU ({readers}), {self.num_updates} updates in "
            f"{self.precision}, against one process",
            *(f"  {each.subject:<{width}}  {each.outcome:<12}  {each.detail}" for each in self.findings),
        ]
        differing = [finding.subject for finding in self.findings if finding.outcome == DIFFERS]
        skipped = sum(finding.outcome == SKIPPED for finding in self.findings)
        result = f"differs: {', '.join(differing)}" if differing else "equal to one process"
        if not self.has_passed and not differing:
            result = "nothing was compared"
        return "\n".join([*lines, result + (f"; {skipped} not compared" if skipped else "")])


def _versions() -> dict[str, str]:
    found = {name: metadata.version(name) for name in _PACKAGES}
    return {**found, "python": platform.python_version()}

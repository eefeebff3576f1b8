"""What passes under the stock strategy and not under ours, but for what `suite.toml` accepts."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from tests.lightning_suite.outcomes import Outcome, run

FAILED = ("failed", "died")


@dataclass(frozen=True)
class Accepted:
    """Tests that may fail under a strategy of ours.

    Args:
        tests: Patterns of their names, in which ``*`` is anything.
        under: Patterns of names of strategies.
        reason: Why it has to be so.
    """

    tests: Sequence[str]
    under: Sequence[str]
    reason: str

    def covers(self, test: str, strategy: str) -> bool:
        # A parameter's brackets are no sets of letters.
        tests = [pattern.replace("[", "[[]") for pattern in self.tests]
        return any(fnmatchcase(strategy, each) for each in self.under) and any(fnmatchcase(test, e) for e in tests)


@dataclass(frozen=True)
class Suite:
    """The tests to run, in one process or on ranks that they start, and those that may fail."""

    paths: Sequence[str]
    of_ranks: Sequence[str]
    accepted: Sequence[Accepted]

    @classmethod
    def read(cls) -> Suite:
        """The suite as ``suite.toml`` has it."""
        given = tomllib.loads(Path(__file__).with_name("suite.toml").read_text())
        return cls(given["paths"], given["of_ranks"], [Accepted(**each) for each in given.get("accepted", ())])

    def run(
        self, checkout: Path, strategy: str, folder: Path, *, paths: Sequence[str] = (), start_ranks: bool = False
    ) -> dict[str, Outcome]:
        """Run the tests of one process, or those that start ranks.

        Args:
            checkout: Of Lightning.
            strategy: In the place of the default one.
            folder: Where outcomes are noted.
            paths: Of other tests.
            start_ranks: Whether tests start ranks.
        """
        chosen = paths or (self.of_ranks if start_ranks else self.paths)
        file = folder / f"{strategy}{'.ranks' if start_ranks else ''}.jsonl"
        return run(checkout.resolve(), strategy, chosen, file.resolve(), start_ranks=start_ranks)


@dataclass(frozen=True)
class Comparison:
    """The outcomes under a strategy of ours beside those under the stock one.

    Args:
        strategy: The name of ours.
        stock: Name of a test -> how it ended under the stock strategy.
        ours: Likewise, under ours.
        accepted: What may fail.
    """

    strategy: str
    stock: Mapping[str, Outcome]
    ours: Mapping[str, Outcome]
    accepted: Sequence[Accepted]

    @property
    def worse(self) -> dict[str, Outcome]:
        """Tests that fail only under ours; one that is missing under either has not run."""
        both = self.stock.keys() & self.ours.keys()
        return {
            test: outcome
            for test, outcome in self.ours.items()
            if outcome.kind in FAILED and test in both and self.stock[test].kind not in FAILED
        }

    @property
    def unexplained(self) -> dict[str, Outcome]:
        """Those of `worse` that nobody has accepted."""
        return {t: o for t, o in self.worse.items() if not any(a.covers(t, self.strategy) for a in self.accepted)}

    @property
    def obsolete(self) -> list[str]:
        """Reasons of what is accepted, though no test that has run needs it any more."""
        return [
            f"{each.reason} ({', '.join(each.tests)})"
            for each in self.accepted
            if any(each.covers(test, self.strategy) for test, ours in self.ours.items() if ours.kind != "skipped")
            and not any(each.covers(test, self.strategy) for test in self.worse)
        ]

    def report(self) -> str:
        """The figures, then each test that fails and should not."""
        counts = [
            f"{name}: {', '.join(f'{count} {kind}' for kind, count in sorted(Counter(kinds).items()))}"
            for name, kinds in (
                ("stock", [outcome.kind for outcome in self.stock.values()]),
                (self.strategy, [outcome.kind for outcome in self.ours.values()]),
            )
        ]
        explained = len(self.worse) - len(self.unexplained)
        lines = [*counts, f"only under {self.strategy}: {len(self.worse)} failed, of which {explained} are accepted"]
        lines += [f"  {test}: {outcome.kind}: {outcome.error}" for test, outcome in self.unexplained.items()]
        return "\n".join([*lines, *(f"  accepted, though all pass: {reason}" for reason in self.obsolete)])

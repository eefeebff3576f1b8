"""The report of ``doctor``: tables in Markdown, and a picture of an update on each rank."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_parallel.callbacks.breakdown_windows import ALONE
from lightning_parallel.callbacks.fit_summary import GIB
from lightning_parallel.callbacks.metered_steps import MeteredWindow

_RATES = {
    "samples_per_sec": "samples a second",
    "tokens_per_sec": "tokens a second",
    "flops_per_sec": "FLOP/s",
    "mfu": "MFU",
}


@dataclass(frozen=True)
class Examination:
    """Measurements of a run.

    Args:
        strategy: The strategy as it was given.
        windows: Windows of updates, in order.
        verdicts: Sentences on what holds it up.
        exposed: Of each rank, seconds of an update in which it communicates and does not compute.
        rates: Values of a `Throughput`.
    """

    strategy: str
    windows: Sequence[MeteredWindow]
    verdicts: Sequence[str]
    exposed: Sequence[float]
    rates: Mapping[str, float]

    def to_markdown(self, picture: str) -> str:
        """The report.

        Args:
            picture: The path of a picture beside it; empty without one.
        """
        parts = [f"# {self.strategy}", "## What holds it up", self._verdicts()]
        if self.windows:
            parts += ["## Where an update goes", self._table(), self._facts()]
            parts += [f"![An update on each rank]({picture})"] * bool(picture)
        return "\n\n".join(parts) + "\n"

    def _verdicts(self) -> str:
        if not self.windows:
            return "Nothing was timed: there were too few updates."
        nothing = f"Nothing that costs a tenth of an update, in {len(self.windows)} windows."
        return "\n".join(f"- {sentence}" for sentence in self.verdicts) or nothing

    def _table(self) -> str:
        rows = mean_rows(self.windows)
        names = list(rows[0])
        lines = [["rank", *names, "together"], ["---:"] * (len(names) + 2)]
        for rank, row in enumerate(rows):
            lines.append([str(rank), *(_ms(row[name]) for name in names), _ms(sum(row.values()))])
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return f"Milliseconds, in the mean over {sum(each.steps for each in self.windows)} updates:\n\n{table}"

    def _facts(self) -> str:
        memory = self.windows[-1].memory.peak / GIB
        facts = [f"at most {memory:.3g} GiB of memory on a rank"]
        if self.exposed:
            facts.append(f"{_ms(min(self.exposed))} ms of communication that nothing hides, in a profiled update")
        found = {words: self.rates.get(f"throughput/{name}") for name, words in _RATES.items()}
        facts += [f"{value:.4g} {words}" for words, value in found.items() if value is not None]
        return "\n".join(f"- {fact}" for fact in facts)


def mean_rows(windows: Sequence[MeteredWindow]) -> list[dict[str, float]]:
    """Of each rank, phase -> the seconds of an update, in the mean over all windows."""
    steps = sum(each.steps for each in windows)
    return [
        {
            name: sum(each.steps * each.rows[rank][name] for each in windows) / steps
            for name in windows[0].rows[rank]
            if name != ALONE
        }
        for rank in range(len(windows[0].rows))
    ]


def can_draw() -> bool:
    """Whether matplotlib is installed, which comes with the extra ``bench``."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(windows: Sequence[MeteredWindow], path: Path) -> None:
    """Draw an update of each rank as a bar of its phases, from left to right.

    Args:
        windows: The windows, at least one.
        path: The file; its ending says the format.
    """
    from matplotlib.figure import Figure

    rows = mean_rows(windows)
    figure = Figure(figsize=(8.0, 0.4 * len(rows) + 1.6), layout="constrained")
    panel = figure.subplots()
    left = [0.0] * len(rows)
    for number, name in enumerate(rows[0]):
        widths = [1000 * row[name] for row in rows]
        panel.barh(range(len(rows)), widths, left=left, label=name, color=f"C{number}")
        left = [start + width for start, width in zip(left, widths, strict=True)]
    panel.set_yticks(range(len(rows)), [f"rank {rank}" for rank in range(len(rows))])
    panel.invert_yaxis()
    panel.set_xlabel("milliseconds of an update, in the mean")
    figure.legend(loc="outside lower center", ncols=len(rows[0]), frameon=False)
    figure.savefig(path, dpi=150)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g}"

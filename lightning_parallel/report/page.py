"""One page of HTML with runs in it: no scripts, nothing from elsewhere, dark or light as the reader has it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from html import escape

from lightning_parallel.report.charts import NUM_COLORS
from lightning_parallel.report.panels import Panel, Section, sections_of
from lightning_parallel.report.runs import Run, Series
from lightning_parallel.report.scales import in_words

_LIGHT = ("#2f6fbd", "#c96a12", "#2f8442", "#8f4fb3", "#bf3f4c", "#6b737b", "#12888a", "#97741a")
_DARK = ("#5b9fe8", "#e69545", "#58b26d", "#bd86dc", "#e5717c", "#98a1aa", "#3db8ba", "#cfa845")
_STYLE = """
:root { color-scheme: light dark; --ground: #ffffff; --panel: #f6f7f9; --text: #1c2126; --faint: #5c656e;
  --grid: #dde1e5; LIGHT }
@media (prefers-color-scheme: dark) { :root { --ground: #14171a; --panel: #1d2125; --text: #e6e9ec; --faint: #a0a9b2;
  --grid: #353b41; DARK } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 90rem; padding: 1rem; background: var(--ground); color: var(--text);
  font: 15px/1.45 system-ui, sans-serif }
h1 { font-size: 1.4rem; margin: .2rem 0 .8rem }
h2, summary { font-size: 1.1rem; font-weight: 600; margin: 1.4rem 0 .6rem }
summary { cursor: pointer }
.panels { display: grid; gap: .8rem; grid-template-columns: repeat(auto-fill, minmax(min(100%, 25rem), 1fr)) }
figure { margin: 0; padding: .6rem .7rem; background: var(--panel); border-radius: .5rem; min-width: 0 }
figcaption { font-weight: 600; margin-bottom: .3rem; overflow-wrap: anywhere }
svg { display: block; width: 100%; height: auto }
svg text { fill: var(--faint); font: 12px system-ui, sans-serif } svg text.on { fill: var(--ground); font-weight: 600 }
.grid { stroke: var(--grid); stroke-opacity: .6 }
.line { fill: none; stroke: currentColor; stroke-width: 1.8; stroke-linejoin: round }
.dashed { stroke-dasharray: 5 4 } .fill { fill: currentColor }
ul.key { list-style: none; display: flex; flex-wrap: wrap; gap: .15rem 1rem; margin: .3rem 0 0; padding: 0;
  color: var(--faint); font-size: .87rem }
ul.key li { overflow-wrap: anywhere }
ul.key span { display: inline-block; width: .8em; height: .8em; border-radius: .2em;
  margin-right: .4em; background: currentColor }
.table { overflow-x: auto; margin-top: .8rem } table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .25rem .8rem .25rem 0; text-align: right; border-bottom: 1px solid var(--grid); white-space: nowrap }
th { color: var(--faint); font-weight: 500 } th:first-child, td:first-child { text-align: left }
"""
_COLUMNS = {
    "samples/s": "throughput/samples_per_sec",
    "tokens/s": "throughput/tokens_per_sec",
    "MFU": "throughput/mfu",
    "s a step": "breakdown/step_seconds",
}


def build_page(runs: Sequence[Run], title: str) -> str:
    """The page.

    Args:
        runs: The runs, in the order in which they are shown.
        title: Its heading.
    """
    body = "".join(_section(section) for section in sections_of(runs))
    colors = _key([(run.name, place) for place, run in enumerate(runs)]) if len(runs) > 1 else ""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_style()}</style></head>\n"
        f"<body><h1>{escape(title)}</h1>{colors}{_table(runs)}{body}</body></html>\n"
    )


def _style() -> str:
    def listed(colors: Sequence[str]) -> str:
        return " ".join(f"--c{place}: {color};" for place, color in enumerate(colors))

    classes = "\n".join(f".c{place} {{ color: var(--c{place}) }}" for place in range(NUM_COLORS))
    return _STYLE.replace("LIGHT", listed(_LIGHT)).replace("DARK", listed(_DARK)) + classes


def _section(section: Section) -> str:
    panels = "".join(_figure(panel) for panel in section.panels)
    grid = f'<div class="panels">{panels}</div>'
    if section.is_open:
        return f"<section><h2>{escape(section.title)}</h2>{grid}</section>\n"
    words = f"{section.title} ({len(section.panels)})"
    return f"<details><summary>{escape(words)}</summary>{grid}</details>\n"


def _figure(panel: Panel) -> str:
    return f"<figure><figcaption>{escape(panel.title)}</figcaption>{panel.svg}{_key(panel.key)}</figure>"


def _key(labels: Sequence[tuple[str, int]]) -> str:
    items = "".join(f'<li><span class="c{color % NUM_COLORS}"></span>{escape(label)}</li>' for label, color in labels)
    return f'<ul class="key">{items}</ul>' if items else ""


def _table(runs: Sequence[Run]) -> str:
    """Figures of each run: its last step, each loss in the end and at its least, rates in the median, memory."""
    losses = sorted({name for run in runs for name in run.series if name.endswith("loss")})
    heads = ["run", "last step"]
    heads += [words for name in losses for words in (name, f"least {name}")]
    heads += [head for head, name in _COLUMNS.items() if any(name in run.series for run in runs)]
    heads += ["peak memory"] if any("memory/peak_gib" in run.series for run in runs) else []
    rows = [_row(run, losses, heads) for run in runs]
    cells = "".join(f"<th>{escape(head)}</th>" for head in heads)
    lines = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="table"><table><tr>{cells}</tr>{lines}</table></div>'


def _row(run: Run, losses: Sequence[str], heads: Sequence[str]) -> list[str]:
    row = [run.name, str(max(series.steps[-1] for series in run.series.values()))]
    for name in losses:
        known = run.series[name].finite if name in run.series else []
        row += [in_words(run.series[name].values[-1]), in_words(min(known))] if known else ["", ""]
    row += [_median(run.series.get(name), head) for head, name in _COLUMNS.items() if head in heads]
    if "peak memory" in heads:
        memory = run.series["memory/peak_gib"].finite if "memory/peak_gib" in run.series else []
        row.append(f"{max(memory):.3g} GiB" if memory else "")
    return row


def _median(series: Series | None, head: str) -> str:
    if series is None or not series.finite:
        return ""
    value = statistics.median(series.finite)
    return f"{value:.1%}" if head == "MFU" else in_words(value)

"""Write the page of everything that is refused, from the code: ``python docs/limits.py`` writes ``limits.md``.

The messages are read from the sources by `refusals.py`; `limits.toml` says where each belongs and why it is so.
"""

from __future__ import annotations

import fnmatch
import textwrap
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from refusals import Code, Text

DOCS = Path(__file__).resolve().parent
PAGE = DOCS / "limits.md"
OUTLINE = DOCS / "limits.toml"
WIDTH = 120


@dataclass(frozen=True)
class Group:
    """Messages with one subject.

    Args:
        title: The heading.
        sources: Where in the code they are written.
        texts: The messages.
        under: The names and arguments with which they can be met.
        why: The reason, where the messages are too short for it.
    """

    title: str
    sources: tuple[str, ...]
    texts: tuple[Text, ...]
    under: str = ""
    why: str = ""


@dataclass(frozen=True)
class Section:
    """Groups of one part of the package.

    Args:
        title: The heading.
        groups: In order.
        intro: What stands before them.
        kind: ``"limit"``, which needs a reason; ``"value"`` that no version could take; or ``"told"``, no refusal.
    """

    title: str
    groups: tuple[Group, ...]
    intro: str = ""
    kind: str = "limit"

    @property
    def texts(self) -> list[Text]:
        """The messages of all groups."""
        return [text for group in self.groups for text in group.texts]


class Limits:
    """What the page says, and what is missing on it.

    Args:
        code: The sources.
        outline: The contents of `limits.toml`.
    """

    def __init__(self, code: Code, outline: dict[str, Any]) -> None:
        self.code = code
        self._outline = outline

    @cached_property
    def sections(self) -> list[Section]:
        """The page, in order."""
        return [self._section(**section) for section in self._outline["section"]]

    def _section(self, group: list[dict[str, Any]], **rest: Any) -> Section:
        return Section(groups=tuple(self._group(**each) for each in group), **rest)

    def _group(self, sources: list[str], **rest: Any) -> Group:
        return Group(sources=tuple(sources), texts=tuple(self.texts_of(sources)), **rest)

    @cached_property
    def _refusals(self) -> dict[str, list[Text]]:
        """Source -> the refusals that are written there."""
        found: dict[str, list[Text]] = {}
        for text in self.code.refusals():
            found.setdefault(text.source, []).append(text)
        return found

    def texts_of(self, sources: Iterable[str]) -> list[Text]:
        """The messages that are written in `sources`, each once."""
        found: dict[str, Text] = {}
        for source in sources:
            for text in self._refusals.get(source) or self.code.texts_in(source):
                found.setdefault(text.words, text)
        return list(found.values())

    # What is missing --------------------------------------------------------------------------------------------------

    @cached_property
    def placed(self) -> list[str]:
        """All sources that `limits.toml` names, those of the page first."""
        on_page = [source for section in self.sections for group in section.groups for source in group.sources]
        return [*on_page, *self._outline["internal"]["sources"]]

    def unplaced(self) -> list[str]:
        """Refusals in the code that belong to no group, with their sources."""
        return [
            f"{source}: {text.words}"
            for source, texts in self._refusals.items()
            if source not in self.placed and not self._is_told(source)
            for text in texts
        ]

    def dead(self) -> list[str]:
        """Sources and patterns that name no message, or that are named twice."""
        twice = [source for source, times in Counter(self.placed).items() if times > 1]
        empty = [source for source in self.placed if not self.texts_of([source])]
        written = {text.source for text in self.code.sentences()}
        told = self._outline["told"]["sources"]
        return [*twice, *empty, *(pattern for pattern in told if not fnmatch.filter(written, pattern))]

    def unread(self) -> list[str]:
        """Sentences in the code that are neither in a message of the page nor known to refuse nothing."""
        seen = {part for text in [*self.texts_of(self.placed), *self.code.refusals()] for part in text.parts}
        return [
            f"{text.source}: {text.words}"
            for text in self.code.sentences()
            if not text.parts & seen and not self._is_told(text.source)
        ]

    def _is_told(self, source: str) -> bool:
        return any(fnmatch.fnmatchcase(source, pattern) for pattern in self._outline["told"]["sources"])


# The page ---------------------------------------------------------------------------------------------------------

_HEAD = """\
# Everything that is refused

This page lists every message with which the package refuses a set-up, a module or a step, why it is so, and the way
around: {number} messages. Most come before training starts, all that apply at once; the others name the layer, the
parameter or the line of your code. [Errors you may see](errors.md) explains the frequent ones at more length, and the
[support matrix](support_matrix.md) shows which modules the tests train under which name.

In the messages, `<name>` stands for a value, and brackets for what is not always there: `[one | another]`. The way
around is a value that is possible, a change to the module or the step, a strategy without this limit, or the degree 1,
with which the technique is off.

The page is made from the code by `docs/limits.py`, and a test fails while it leaves a message out.
"""


def read(code: Code | None = None) -> Limits:
    """The limits of the package as its code is now."""
    return Limits(code or Code(), tomllib.loads(OUTLINE.read_text(encoding="utf-8")))


def page(limits: Limits) -> str:
    """The page in Markdown."""
    number = sum(len(section.texts) for section in limits.sections if section.kind != "told")
    blocks = [_HEAD.format(number=number).rstrip()]
    for section in limits.sections:
        blocks += [f"## {section.title}", *_paragraph(section.intro)]
        for group in section.groups:
            blocks += [f"### {group.title}", *_paragraph(f"Under: {group.under}." if group.under else "")]
            blocks += _paragraph(group.why)
            blocks.append("\n".join(_item(text.words) for text in group.texts))
    return "\n\n".join(blocks) + "\n"


def _paragraph(words: str) -> Iterator[str]:
    if words:
        yield textwrap.fill(words, WIDTH, break_long_words=False, break_on_hyphens=False)


def _item(words: str) -> str:
    """A message as an item of a list, in monospace, since it holds code."""
    quotes = "``" if "`" in words else "`"
    space = " " if quotes == "``" else ""
    whole = f"{quotes}{space}{' '.join(words.split())}{space}{quotes}"
    return textwrap.fill(
        whole, WIDTH, initial_indent="- ", subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


if __name__ == "__main__":
    PAGE.write_text(page(read()), encoding="utf-8")

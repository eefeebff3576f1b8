"""The page of refusals: it is that of the code, and every refusal on it says what to change."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
FIELD = re.compile("<[^>]*>")
VERBS = (
    "bring build call called choose choosing compute define draw freeze give hook install keep leave let load log make "
    "name pass put read register return seed shard start take train unfreeze use weight write"
)
WAY_AROUND = re.compile(rf"\b({'|'.join(VERBS.split())}|possible|there are|are there|containers)\b", re.IGNORECASE)
"""Words by which a message says what to change, or what is possible."""
NO_REASON = re.compile(r"not (available(?! here)|yet|supported|implemented)|this version|so far", re.IGNORECASE)


@pytest.fixture(scope="module")
def modules() -> Iterator[tuple[ModuleType, ModuleType]]:
    """The scripts that write the page, and that read the code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "docs")
        yield importlib.import_module("limits"), importlib.import_module("refusals")


@pytest.fixture(scope="module")
def script(modules: Any) -> Any:
    return modules[0]


@pytest.fixture(scope="module")
def limits(script: Any) -> Any:
    return script.read()


# The page ---------------------------------------------------------------------------------------------------------


def test_the_page_is_that_of_the_code(script: Any, limits: Any) -> None:
    """`python docs/limits.py` writes it anew."""
    assert script.PAGE.read_text() == script.page(limits)


def test_every_refusal_has_its_place(limits: Any) -> None:
    """One that has none belongs into a group of `docs/limits.toml`."""
    assert limits.unplaced() == []


def test_the_outline_names_what_is_there(limits: Any) -> None:
    assert limits.dead() == []


def test_every_sentence_in_the_code_is_known(limits: Any) -> None:
    """One that is not is a refusal that is not found, or belongs under `told` in `docs/limits.toml`."""
    assert limits.unread() == []


def test_every_limit_has_a_reason_and_says_where_it_is_met(limits: Any) -> None:
    for section in limits.sections:
        for group in section.groups:
            assert group.texts, group.title
            is_limit = section.kind == "limit"
            assert (bool(group.under), bool(group.why)) == (is_limit, is_limit), group.title


def test_every_refusal_says_what_to_change(limits: Any) -> None:
    silent = []
    for section in limits.sections:
        for text in section.texts if section.kind != "told" else ():
            words = FIELD.sub("", text.words)
            _, _, rest = re.sub("[:;.,] ", "\n", words, count=1).partition("\n")
            if not WAY_AROUND.search(rest) and not re.search(r"\bmust\b|\bnone of\b", words):
                silent.append(f"{text.source}: {text.words}")
    assert silent == []


def test_that_nobody_has_done_it_is_no_reason(limits: Any) -> None:
    texts = [text.words for section in limits.sections for text in section.texts]
    assert [words for words in texts if NO_REASON.search(words)] == []


def test_readers_are_led_to_the_page() -> None:
    assert "\nlimits\n" in (ROOT / "docs" / "index.md").read_text()
    for page in ("README.md", "docs/errors.md", "docs/support_matrix.md"):
        assert "limits.md)" in (ROOT / page).read_text(), page


# How the code is read -----------------------------------------------------------------------------------------------

PACKAGE = {
    "errors.py": """
        def check(violations): ...
    """,
    "words.py": '''
        KINDS = ("one", "two")
        REMEDY = "give kind=one"
        def unknown(kind):
            """A docstring is no refusal of anything at all."""
            return f"kind={kind!r} is unknown; possible: {', '.join(KINDS)}"
    ''',
    "rules.py": """
        from lightning_parallel.errors import check
        from lightning_parallel.words import REMEDY, unknown
        WHY = {"size": "a size is no number of things"}
        def kind_violations(kind, ranks):
            found = []
            start = f"kind={kind}"
            if ranks > 1:
                found.append(f"{start} with {len(ranks)} ranks cannot be shared; {REMEDY}")
            hint = f"did you mean {kind}? " if ranks else ""
            return [*found, unknown(kind), f"there is nothing of that kind; {hint}give another"]
        class Rule:
            def apply(self, name):
                check(WHY[name] for name in ())
                if name:
                    raise ValueError(self._refused(f"the rule of {name}"))
                print("this is only told to people")
            def _refused(self, what):
                return f"{what} holds for one rank; give ranks=1"
    """,
}


@pytest.fixture
def code(modules: Any, tmp_path: Path) -> Any:
    """A package of three files."""
    for name, text in PACKAGE.items():
        lines = text.strip("\n").split("\n")
        (tmp_path / name).write_text("\n".join(line.removeprefix(" " * 8) for line in lines))
    return modules[1].Code(tmp_path)


def test_texts_are_followed_to_where_they_are_written(code: Any) -> None:
    """Through lists, variables, constants, functions of other files, their arguments, and methods."""
    assert [(text.source, text.words) for text in code.refusals()] == [
        ("rules:WHY", "a size is no number of things"),
        ("rules:kind_violations", "kind=<kind> with <number of ranks> ranks cannot be shared; give kind=one"),
        ("rules:kind_violations", "there is nothing of that kind; [did you mean <kind>? ]give another"),
        ("rules:Rule._refused", "the rule of <name> holds for one rank; give ranks=1"),
        ("words:unknown", "kind=<kind> is unknown; possible: one, two"),
    ]


def test_what_is_missing_is_found(script: Any, code: Any) -> None:
    group = {"title": "", "sources": ["words:unknown", "rules:kind_violations", "rules:gone"]}
    outline = {"section": [{"title": "", "group": [group]}], "internal": {"sources": []}, "told": {"sources": ["a:*"]}}
    limits = script.Limits(code, outline)
    assert [line.partition(":")[2].partition(":")[0] for line in limits.unplaced()] == ["WHY", "Rule._refused"]
    assert limits.dead() == ["rules:gone", "a:*"]
    assert limits.unread() == ["rules:Rule.apply: this is only told to people"]


def test_sentences_that_nothing_leads_to_are_taken_by_name(code: Any) -> None:
    found = [text.words for text in code.texts_in("rules:Rule.apply")]
    assert found == ["the rule of <name>", "this is only told to people"]
    assert code.texts_in("rules:nothing") == []

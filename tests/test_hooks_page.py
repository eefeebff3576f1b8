"""The table in `docs/hooks.md` of what is whole when, against the hooks of a fit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.whole_when import found_in_hooks

PAGE = Path(__file__).parents[1] / "docs" / "hooks.md"


def table() -> dict[str, dict[str, str]]:
    """Name -> hook -> what the page says."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in PAGE.read_text().splitlines()
        if line.startswith(("| `", "| hook "))
    ]
    head = next(row for row in rows if row[0] == "hook")
    found: dict[str, dict[str, str]] = {}
    for row in rows:
        for names, cell in zip(head[1:], row[1:], strict=False):
            for name in re.findall(r"`(\w+)`", names):
                if len(row) == len(head) and row is not head:
                    found.setdefault(name, {}).update(dict.fromkeys(re.findall(r"`(\w+)`", row[0]), cell))
    return found


def test_the_page_is_read() -> None:
    assert set(table()) == {
        "ddp_custom", "zero1_custom", "zero2_custom", "fsdp_custom", "tp_custom", "pp_custom"
    }  # fmt: skip
    assert len(table()["fsdp_custom"]) == 13


@pytest.mark.parametrize("name", ["ddp_custom", "zero2_custom", "fsdp_custom", "tp_custom", "pp_custom"])
def test_hooks_find_what_the_page_says(ranks: Any, name: str) -> None:
    said = table()[name]
    for rank, found in enumerate(ranks(2).run(found_in_hooks, name, 2)):
        assert set(found) == set(said)
        own = ("whole", "placeholder") if rank == 0 else ("placeholder", "whole")
        for hook, (layer, head, gradient) in found.items():
            assert (layer, head) == (own if said[hook] == "own" else tuple(said[hook].split(", "))), (rank, hook)
            if hook in ("on_after_backward", "on_before_optimizer_step", "on_train_batch_end"):
                assert gradient == layer, (rank, hook)

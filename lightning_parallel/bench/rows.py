"""The rows of a bench: strategies of this package, of Lightning, and a loop written by hand."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from lightning.pytorch.strategies import ModelParallelStrategy, StrategyRegistry

from lightning_parallel.errors import ConfigurationError
from lightning_parallel.presets import PRESETS, build_strategy, split_items
from lightning_parallel.strategies.data_parallel import DataParallelStrategy

LOOP = "loop"
ALL = "all"
_OF_LIGHTNING = "lightning:"
_FSDP2 = "ModelParallelStrategy"
_STARTING_PROCESSES = ("spawn", "fork", "notebook")
"""Parts of names of Lightning's that start ranks by themselves; here, ranks are there before."""


@dataclass(frozen=True)
class Row:
    """One way to train the recipe.

    Args:
        name: As it was given: ``"fsdp_custom:tensor=2"``, ``"lightning:ddp"`` or ``"loop"``.
    """

    name: str

    @property
    def is_loop(self) -> bool:
        """Whether it is the loop written by hand, without a Trainer."""
        return self.name == LOOP

    @property
    def is_one_process(self) -> bool:
        """Whether one process has all devices."""
        preset = PRESETS.get(self.name.partition(":")[0])
        return preset is not None and preset.build is DataParallelStrategy

    def strategy(self) -> Any:
        """A new strategy, or a name of Lightning's, for the Trainer.

        The comparison of the first step is left out unless it was asked for: its copy of the module would count as
        memory.
        """
        if self.name.startswith(_OF_LIGHTNING):
            own = self.name.removeprefix(_OF_LIGHTNING)
            return ModelParallelStrategy() if own == _FSDP2 else own
        name, _, options = self.name.partition(":")
        given = split_items(options)
        if not any(item.startswith("check=") for item in given):
            given.append("check=off")
        return build_strategy(f"{name}:{','.join(given)}")

    def violations(self) -> list[str]:
        """Reasons why there is no such row; empty if there is."""
        if self.is_loop:
            return []
        if self.name.startswith(_OF_LIGHTNING):
            return [] if self.name in names_of_lightning() else [_unknown_of_lightning(self.name)]
        if (own := f"{_OF_LIGHTNING}{self.name}") in names_of_lightning():
            return [f"{self.name} is a strategy of Lightning's; give {own}"]
        try:
            build_strategy(self.name)
        except ConfigurationError as error:
            return list(error.violations)
        return []


def names_of_lightning() -> list[str]:
    """The names of rows that are strategies of Lightning's own."""
    own = [name for name in StrategyRegistry if name not in PRESETS]
    return [
        f"{_OF_LIGHTNING}{name}" for name in [*own, _FSDP2] if not any(part in name for part in _STARTING_PROCESSES)
    ]


def rows_in(text: str) -> list[Row]:
    """The rows of a list with commas, in which options may follow a name.

    A part such as ``tensor=2`` is an option of the name before it. ``all`` stands for all names of this package.

    Args:
        text: Such as ``"ddp_custom,fsdp_custom:tensor=2,recompute=full,lightning:ddp,loop"``.
    """
    names: list[str] = []
    for item in split_items(text):
        is_option = "=" in item.partition(":")[0]
        if is_option and names:
            names[-1] += f"{',' if ':' in names[-1] else ':'}{item}"
        elif item == ALL:
            names += PRESETS
        else:
            names.append(item)
    return [Row(name) for name in names]


def row_violations(rows: Iterable[Row]) -> list[str]:
    """Everything that is wrong with the names of rows, at once."""
    rows = list(rows)
    violations = [violation for row in dict.fromkeys(rows) for violation in row.violations()]
    twice = [row.name for row in dict.fromkeys(rows) if rows.count(row) > 1]
    violations += [f"--strategies names {name} twice; leave one out" for name in twice]
    if not rows:
        violations.append(f"--strategies names nothing; possible: {', '.join(PRESETS)}, {ALL}, lightning:ddp, {LOOP}")
    return violations


def _unknown_of_lightning(name: str) -> str:
    return f"{name} is no strategy of Lightning's that can run here; possible: {', '.join(names_of_lightning())}"

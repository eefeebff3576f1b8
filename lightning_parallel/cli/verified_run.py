"""One of the two runs of ``verify``: ``python -m lightning_parallel.cli.verified_run parallel|reference ...``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from typing_extensions import override

from lightning_parallel.cli.lightning_cli import is_first_process
from lightning_parallel.cli.recipe_cli import RecipeCLI
from lightning_parallel.errors import ConfigurationError
from lightning_parallel.presets import PRESETS
from lightning_parallel.verification.records import Record, load_records
from lightning_parallel.verification.runs import Parts, run_recorded, run_reference

_REFUSED = 2
_EVALUATED = 2
"""Batches of an evaluation."""


class _ComparedCLI(RecipeCLI):
    """A recipe's trainer, module and data, with the trainer of a verification.

    Args:
        overrides: Arguments of the Trainer.
        is_reference: Whether the recipe's strategy is left out.
        longer: The number by which accumulation windows are longer.
        args: The recipe's arguments.
        callbacks: More callbacks.

    Attributes:
        given: The strategy as the recipe and its arguments give it.
    """

    def __init__(
        self, overrides: dict[str, Any], *, is_reference: bool, longer: int, args: list[str], callbacks: list[Any]
    ) -> None:
        self._is_reference, self._longer = is_reference, longer
        self.given = ""
        super().__init__(overrides, args=args, callbacks=callbacks)

    @override
    def before_instantiate_classes(self) -> None:
        trainer = self._get(self.config, "trainer")
        self.given = self._get(self.config, "strategy") or _name_of(trainer.get("strategy"))
        trainer["accumulate_grad_batches"] = trainer.get("accumulate_grad_batches", 1) * self._longer
        if self._is_reference:
            self.config["strategy"], trainer["strategy"], trainer["limit_train_batches"] = None, "auto", None
        elif text := self._get(self.config, "strategy"):
            self.config["strategy"] = _compared(text)
        super().before_instantiate_classes()


def _name_of(strategy: Any) -> str:
    """Lightning's argument as text: a name, or the class of ``class_path``."""
    return strategy if isinstance(strategy, str) else str(getattr(strategy, "class_path", strategy))


def _compared(text: str) -> str:
    """The string of a strategy, with the comparison of its first step."""
    name, _, options = text.partition(":")
    if name not in PRESETS or "check=" in options:
        return text
    return f"{name}:{options},check=first_step" if options else f"{name}:check=first_step"


def run(which: str, folder: Path, num_ranks: int, updates: int, precision: str, recipe: list[str]) -> Record:
    """Run a recipe as a verification does.

    Args:
        which: ``"parallel"`` or ``"reference"``.
        folder: For records and checkpoints.
        num_ranks: The number of ranks of the former.
        updates: The number of updates.
        precision: The precision of both.
        recipe: The recipe's arguments.
    """
    is_reference = which == "reference"
    limit = None if is_reference else _EVALUATED
    overrides = {
        "accelerator": "cpu",
        "devices": 1 if is_reference else num_ranks,
        "precision": precision,
        "max_steps": updates,
        "val_check_interval": 1.0,
        "limit_val_batches": limit,
        "limit_test_batches": limit,
        "limit_predict_batches": limit,
        "default_root_dir": str(folder),
    }

    def make(*, callbacks: list[Any], longer: int = 1) -> Parts:
        cli = _ComparedCLI(overrides, is_reference=is_reference, longer=longer, args=recipe, callbacks=callbacks)
        return Parts(cli.trainer, cli.model, cli.datamodule, strategy=cli.given)

    if is_reference:
        return run_reference(make, load_records(folder))
    return run_recorded(make, folder)


def main() -> None:
    """Run, and save this rank's record; what ends the first rank is written down for the command."""
    which, place, num_ranks, updates, precision, *recipe = sys.argv[1:]
    folder = Path(place)
    try:
        record = run(which, folder, int(num_ranks), int(updates), precision, recipe)
    except Exception as error:
        is_refused = isinstance(error, ConfigurationError)
        if is_first_process():
            text = str(error) if is_refused else f"{type(error).__name__}: {error}"
            (folder / "error.json").write_text(json.dumps(text))
        if not is_refused:
            raise
        sys.exit(_REFUSED)
    if which == "reference":
        folder = folder / "reference"
        folder.mkdir()
    record.save(folder)


if __name__ == "__main__":
    main()

"""Commands of recipes in a rank of a pool, and what they print."""

from __future__ import annotations

import contextlib
import logging
import os
import runpy
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from lightning_parallel.cli.main import main
from tests.collectives import Collectives, Counts

ROOT = Path(__file__).parents[2]
_LOGS = ("lightning.pytorch", "lightning.fabric", "lightning")


def run_command(words: list[str], folder: str) -> str:
    """What `lightning-parallel` with these words prints on this rank, run in `folder`.

    Args:
        words: Behind the name of the command; paths of recipes are from the root of the repository.
        folder: Where relative paths lead, and where logs and checkpoints are written.

    Raises:
        AssertionError: With all of that, if the status is not 0.
    """
    arguments = [str(ROOT / word) if word.startswith("recipes/") else word for word in words]
    with (
        contextlib.chdir(folder),
        mock.patch.object(sys, "argv", ["lightning-parallel", *arguments]),
        printed() as file,
        warnings.catch_warnings(),
    ):
        # Lightning says so to who gives an optimizer in a config, as a recipe does.
        warnings.filterwarnings("ignore", "`.*` will be overridden by `LightningCLI.configure_optimizers`")
        try:
            main()
        except SystemExit as end:
            if end.code:
                raise AssertionError(file.read_text()) from end
    return file.read_text()


def run_script(path: str, words: list[str], folder: str) -> str:
    """What `python` with a path from the root and these words prints on this rank, run in `folder`."""
    with contextlib.chdir(folder), mock.patch.object(sys, "argv", [path, *words]), printed() as file:
        runpy.run_path(str(ROOT / path), run_name="__main__")
    return file.read_text()


def run_counted(words: list[str], folder: str) -> tuple[str, int]:
    """What `run_command` returns, and how often gradients were reduced into shards."""
    with Collectives() as mode:
        found = run_command(words, folder)
    return found, Counts(dict(mode.counts)).number("reduce_scatter")


@contextlib.contextmanager
def printed() -> Iterator[Path]:
    """A file with all that this process prints meanwhile, logs included."""
    loggers = [logging.getLogger(name) for name in _LOGS]
    levels = [logger.level for logger in loggers]
    handle, path = tempfile.mkstemp()
    kept = [os.dup(1), os.dup(2)]
    sys.stdout.flush()
    for number in (1, 2):
        os.dup2(handle, number)
    for logger in loggers:
        logger.setLevel(logging.INFO)
    try:
        yield Path(path)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        for number, old in zip((1, 2), kept, strict=True):
            os.dup2(old, number)
            os.close(old)
        os.close(handle)

"""The output of a process in a file: beside the screen, or in place of it."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

_OUT, _ERR = 1, 2


class _Both:
    """A stream of text that goes to a screen, and to a file; all else about it is the screen's.

    Args:
        screen: The screen.
        file: The file.
    """

    def __init__(self, screen: TextIO, file: TextIO) -> None:
        self.screen, self.file = screen, file

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):  # a full disk, or a file that is closed already
            self.file.write(text)
        return self.screen.write(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        if name in ("screen", "file"):  # an object that is being copied
            raise AttributeError(name)
        return getattr(self.screen, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Both:
        return self


class Screen:
    """The output of this process, until `close`.

    Args:
        path: The file, to which lines are added; its folder is made.
        is_shown: Whether it is on the screen, too. Then it is what Python writes; else also what libraries write that
            know of no Python.

    Raises:
        OSError: If the file cannot be written.
    """

    def __init__(self, path: Path, *, is_shown: bool) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = path.open("a", buffering=1, encoding="utf-8", errors="replace")
        self._kept: list[int] = []
        self._passed: list[tuple[logging.StreamHandler[Any], Any]] = []
        self._streams: tuple[Any, Any] = (sys.stdout, sys.stderr)
        if is_shown:
            self._redirect(_Both(sys.stdout, self.file), _Both(sys.stderr, self.file))
        else:
            _flush(*self._streams)
            self._kept = [os.dup(_OUT), os.dup(_ERR)]
            os.dup2(self.file.fileno(), _OUT)
            os.dup2(self.file.fileno(), _ERR)
            # The streams themselves may be other ones, as in a notebook.
            self._redirect(self.file, self.file)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Nothing: a process has one output."""

    def close(self) -> None:
        """Let all be on the screen again."""
        for handler, before in self._passed:
            handler.setStream(before)
        sys.stdout, sys.stderr = self._streams
        for number, kept in zip((_OUT, _ERR), self._kept, strict=False):
            os.dup2(kept, number)
            os.close(kept)
        self.file.close()

    def _redirect(self, out: Any, err: Any) -> None:
        sys.stdout, sys.stderr = out, err
        # Handlers of logs have kept their stream since they were made.
        for handler in _handlers():
            for before, after in zip(self._streams, (out, err), strict=True):
                if handler.stream is before:
                    self._passed.append((handler, before))
                    handler.setStream(after)
                    break


def _flush(*streams: Any) -> None:
    for stream in streams:
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def _handlers() -> Iterator[logging.StreamHandler[Any]]:
    for logger in (logging.root, *logging.root.manager.loggerDict.values()):
        if isinstance(logger, logging.Logger):
            yield from (each for each in logger.handlers if isinstance(each, logging.StreamHandler))

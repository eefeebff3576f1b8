"""What compiles layers in tests: with graphs and their partition, but without writing code for them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

from lightning_parallel.techniques.compiling import apply_compile

_DEFAULTS = apply_compile.__kwdefaults__ or {}


def keep_to_graphs() -> None:
    """Let compiled layers run their graphs by torch's own operations, from here on.

    What this package does is in the graphs: hooks, collectives, what backward keeps. Code for them is the compiler's
    own, takes both cores for half a minute, and is written where `writing_code` asks for it.
    """
    _DEFAULTS["backend"] = "aot_eager_decomp_partition"


@contextlib.contextmanager
def writing_code() -> Iterator[None]:
    """Compile as users do."""
    with mock.patch.dict(_DEFAULTS, backend="inductor"):
        yield

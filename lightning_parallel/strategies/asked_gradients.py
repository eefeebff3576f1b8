"""Gradients that a pipelined step asks for by itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

_NO_PATH = "appears to not have been used in the graph"
_ASKED = (
    "Under a pipeline, torch.autograd.grad finds no path to what another stage computes, such as embeddings, and none "
    "between microbatches; give schedule='turns', with which each stage has the whole graph, or pipeline=1"
)


@contextlib.contextmanager
def noting_asked() -> Iterator[None]:
    """Say of an error of `torch.autograd.grad` what to do: a stage has no graph of what others compute."""
    try:
        yield
    except RuntimeError as error:
        if _NO_PATH in str(error):
            error.add_note(_ASKED)
        raise

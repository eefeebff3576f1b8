"""Words with which a step that cannot be cut into stages is refused, by what its layers are given and when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lightning_parallel.module.placeholders import Placeholder, name_sources
from lightning_parallel.techniques.pipeline.turns import DisorderError


def plain_hidden(path: str, hidden: Any) -> Tensor:
    """Return the hidden states that a layer is given, if they can be sent.

    Args:
        path: The path of the layer.
        hidden: What it is given.

    Raises:
        DisorderError: For anything other than a plain tensor of floating-point numbers.
    """
    if not isinstance(hidden, Tensor) or hidden.is_nested or not hidden.is_floating_point():
        kind = "a nested tensor" if getattr(hidden, "is_nested", False) else type(hidden).__name__
        raise DisorderError(
            [
                f"{path} is given {kind} as its first argument, where a pipeline stage needs the hidden states as one "
                "plain tensor of floating-point numbers; give schedule='turns' or pipeline=1"
            ]
        )
    return hidden


def foreign(where: str, placeholders: list[Placeholder]) -> str:
    """Say that a stage needs what only another one has.

    Args:
        where: What needs it, with a verb.
        placeholders: What stands in its place.
    """
    return (
        f"{where} something that only another pipeline stage computes (with "
        f"{name_sources(placeholders) or 'other layers'}), and that was not sent: what passes from stage to stage is "
        "what operations and layers, by their arguments, have taken in the first step. Take the same in each step, "
        "compute it from the batch alone, without parameters, or give schedule='turns' or pipeline=1"
    )


def disorder(what: str) -> str:
    """Say that a step does not go through the layers.

    Args:
        what: What it does.
    """
    return (
        f"{what}; a pipeline needs every step to call each layer of the stack once, one after the other from the first "
        "to the last. Name another stack with layers=, or give schedule='turns' or pipeline=1"
    )


def ended_early(called: Sequence[str]) -> str:
    """Say that a step has not called all layers.

    Args:
        called: The paths of those that it has called.
    """
    where = f"only the layers up to {called[-1]}" if called else "no layer"
    return disorder(f"the step called {where} of the stack")


def out_of_order(path: str, called: Sequence[str]) -> str:
    """Say that a step has called a layer that is not the next one.

    Args:
        path: The path of the layer.
        called: The paths of those that it had called.
    """
    return disorder(f"the step called {path} after {called[-1] if called else 'the beginning of the step'}")


def counting(path: str, name: str) -> str:
    """Say that the code of a layer, or a hook in it, counts.

    Args:
        path: The path of the layer.
        name: What it changes.
    """
    return (
        f"{path}, or a hook in it, changes {name} in each run, and would do so for each microbatch; give "
        "schedule='turns' or pipeline=1"
    )


def writing(where: str) -> str:
    """Say that code before the end of the last layer keeps what it computes.

    Args:
        where: The path of the layer, or the step.
    """
    return (
        f"{where} writes what it computes into a tensor that was there before, as a spectral norm or a running maximum "
        "does, and would do so for each microbatch; give schedule='turns' or pipeline=1"
    )


def reading(refusal: str) -> str:
    """Say that code before the end of the last layer looks at values, as a mixture of experts may.

    Args:
        refusal: The refusal of a placeholder that was read.
    """
    read = refusal.partition(" needs ")[0]
    return f"{read} needs a value that a layer computes, before the last layer; give schedule='turns' or pipeline=1"

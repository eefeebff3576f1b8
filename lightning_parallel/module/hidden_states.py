"""Hidden states among the arguments of a layer; local and whole lengths of sequences that are split over ranks."""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from lightning_parallel.errors import ConfigurationError
from lightning_parallel.ranks.random_streams import drawing_from, seed_of_part

ENDS_LAYER = "_lightning_parallel_ends_layer"
"""Attribute of a node of autograd's graph that hands on what a layer has returned."""


@dataclass
class Lengths:
    """Lengths of the sequences that are split at the moment, in positions.

    Args:
        num_ranks: Ranks that share a sequence.
        multiple: A number that divides each local length.
        whole: Local length -> whole length.
        dim: The dimension of hidden states that is the sequence; 1 for `[batch, length, width]`.
        taken: Lengths of whole tensors, such as learned keys, that must not be mistaken for parts.
        entered: The layer by which a sequence has entered its stack; empty once it has left by the last layer.
        remedy: What to give where that is impossible.
        layers: Those of the stack.
    """

    num_ranks: int
    multiple: int = 1
    whole: dict[int, int] = field(default_factory=dict)
    dim: int = 1
    taken: set[int] = field(default_factory=set)
    entered: str = ""
    remedy: str = "context=1"
    layers: Sequence[nn.Module] = ()

    def add(self, length: int) -> int:
        """Register a sequence of `length` positions, and return its local length.

        Two lengths never get the same local length, so a part's size tells which sequence it belongs to. A local length
        is at least 2, because model code takes a single position for a step of generation.
        """
        local = -(-max(length, self.num_ranks + 1) // (self.num_ranks * self.multiple)) * self.multiple
        while self.whole.get(local, length) != length or local in self.taken:
            local += self.multiple
        self.whole[local] = length
        return local

    def forget(self) -> None:
        """Forget the lengths of the last step, even of one that failed.

        Called when the next step begins and not after a forward, because backward needs the lengths of all forwards.
        """
        self.whole, self.entered = {}, ""

    def check_left(self) -> None:
        """Refuse a step that left a stack before its last layer; called after a step, and before the next entry.

        Raises:
            ConfigurationError: If a sequence has entered the stack and not left it by the last layer.
        """
        if self.entered:
            raise ConfigurationError(
                [
                    f"a step went into the stack by {self.entered} and left it before the last layer, with a part of a "
                    "sequence, or called a layer again before the last one; only the result of the last layer is "
                    f"joined. Let every step go through all layers from first to last, or give {self.remedy}"
                ]
            )

    def between_layers(self, error: Exception) -> list[str]:
        """In words, that code outside of the layers has failed with `error` on a part of a sequence; else empty.

        What fails inside of a layer, such as a collective that waits for a rank in vain, is something else.
        """
        of_shapes, others = (RuntimeError, IndexError, ValueError), (torch.OutOfMemoryError, ConfigurationError)
        is_of_shapes = isinstance(error, of_shapes) and not isinstance(error, others)
        if not is_of_shapes or not self.whole:
            return []
        running = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
        if any(each is layer for each in running for layer in self.layers):
            return []
        parts = ", ".join(f"{part} of {whole}" for part, whole in self.whole.items())
        if self.entered:
            return [
                f"code behind {self.entered}, where each rank has a part of the sequence ({parts} positions), fails "
                f"with: {error}. What it adds to hidden states there is of the whole sequence: give it to the layers "
                f"as an argument, which is cut for them, or give {self.remedy}"
            ]
        numbers = set(map(int, re.findall(r"\b\d+\b", str(error))))
        if not any(part != whole and {part, whole} <= numbers for part, whole in self.whole.items()):
            return []
        return [
            f"code behind the layers fails with: {error}. Only the result of the last layer is of the whole sequence; "
            f"those of the others, which the step or a hook has kept, are parts ({parts} positions). Give {self.remedy}"
        ]


def hidden_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Find the hidden states: a layer's first argument by position, else the first tensor by name, else ``None``.

    Args:
        args: Arguments of the layer, by position.
        kwargs: Arguments by name.
    """
    return args[0] if args else kwargs.get(_name_of_hidden(kwargs))


def with_hidden(hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
    """Replace the hidden states among the arguments of a layer.

    Args:
        hidden: The new ones, `[batch, length, width]`.
        args: Arguments of the layer, by position.
        kwargs: Arguments by name.

    Returns:
        The new `args` and `kwargs`.
    """
    return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, _name_of_hidden(kwargs): hidden})


def take_hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, tuple[Any, ...], dict[str, Any]]:
    """Separate the hidden states from the other arguments of a layer.

    Args:
        args: Arguments of the layer, by position.
        kwargs: Arguments by name.

    Returns:
        The hidden states, and the other arguments by position and by name; a layer may be given the hidden states under
        a second name, which stays among the others.
    """
    hidden: Tensor = hidden_in(args, kwargs)
    taken = "" if args else _name_of_hidden(kwargs)
    return hidden, args[1:], {name: value for name, value in kwargs.items() if name != taken}


def with_hidden_first(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[..., Any]:
    """Let `function` take hidden states by position, before others, and get them as it is given them by its caller.

    A layer may have another argument before them, and be given them by name.

    Args:
        function: The layer.
        args: Arguments of the layer, by position, from which nothing is taken yet.
        kwargs: Arguments by name.
    """
    name = "" if args else _name_of_hidden(kwargs)
    if not name:
        return function

    def by_name(hidden: Tensor, **others: Any) -> Any:
        return function(**{name: hidden}, **others)

    return by_name


def _name_of_hidden(kwargs: dict[str, Any]) -> str:
    return next((name for name, value in kwargs.items() if isinstance(value, Tensor)), "")


@contextlib.contextmanager
def sequence_part_stream(group: ProcessGroup, *, is_needed: bool) -> Iterator[None]:
    """Inside this context, each rank of `group` draws other random numbers, such as those of dropout on its part.

    Args:
        group: The ranks that share a sequence; their random states are equal, and stay equal.
        is_needed: Whether anything is drawn at all; without it, the context does nothing.
    """
    if not is_needed:
        yield
        return
    # Drawn from the common stream, so that all ranks get the same seed and the stream moves on alike.
    seed = int(torch.randint(2**62, ()))
    with drawing_from(seed_of_part(seed, group.rank())):
        yield

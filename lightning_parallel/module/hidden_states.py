"""What runs through a stack of layers, and how long it is where each rank has a part of it. Layer 1."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_parallel.errors import ConfigurationError
from lightning_parallel.ranks.random_streams import drawing_from, seed_of_part


@dataclass
class Lengths:
    """The lengths of the sequences that are split now: local length -> whole length.

    Args:
        num_ranks: How many ranks share a sequence.
        multiple: What divides each local length.
        whole: What is known of them.
        dim: Which dimension of hidden states is the sequence.
        taken: Lengths of what is whole and looks like a part, such as learned keys.
        entered: The layer by which a sequence has entered its stack; empty once it has left by the last layer.
    """

    num_ranks: int
    multiple: int = 1
    whole: dict[int, int] = field(default_factory=dict)
    dim: int = 1
    taken: set[int] = field(default_factory=set)
    entered: str = ""

    def add(self, length: int) -> int:
        """The local length of a sequence of `length`; sequences of two lengths never get the same.

        It is at least two: code takes a single position for a step of generation.
        """
        local = -(-max(length, self.num_ranks + 1) // (self.num_ranks * self.multiple)) * self.multiple
        while self.whole.get(local, length) != length or local in self.taken:
            local += self.multiple
        self.whole[local] = length
        return local

    def forget(self) -> None:
        """Forget the last step, also one that ended in an error; backward may need the lengths of several forwards."""
        self.whole, self.entered = {}, ""

    def check_left(self) -> None:
        """Call it where a step has run, and where the next sequence enters.

        Raises:
            ConfigurationError: If a sequence has entered the stack and not left it by the last layer.
        """
        if self.entered:
            raise ConfigurationError(
                [
                    f"a step went into the stack by {self.entered} and left it before the last layer, with a part of a "
                    "sequence; context parallel joins the result of the last layer only. Let every step go through all "
                    "layers, or give context=1"
                ]
            )


def hidden_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What runs through the stack: a layer's first argument, by position, or the first tensor by name; else `None`."""
    return args[0] if args else kwargs.get(_name_of_hidden(kwargs))


def with_hidden(hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
    """The arguments of a layer with `hidden` in the place of what runs through the stack."""
    return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, _name_of_hidden(kwargs): hidden})


def take_hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, tuple[Any, ...], dict[str, Any]]:
    """What runs through the stack, and the other arguments, among which it may be once more under another name."""
    hidden: Tensor = hidden_in(args, kwargs)
    taken = "" if args else _name_of_hidden(kwargs)
    return hidden, args[1:], {name: value for name, value in kwargs.items() if name != taken}


def _name_of_hidden(kwargs: dict[str, Any]) -> str:
    return next((name for name, value in kwargs.items() if isinstance(value, Tensor)), "")


@contextlib.contextmanager
def sequence_part_stream(group: ProcessGroup, *, is_needed: bool) -> Iterator[None]:
    """Other random numbers on each part of the sequence, from a seed that its ranks draw alike."""
    if not is_needed:
        yield
        return
    seed = int(torch.randint(2**62, ()))
    with drawing_from(seed_of_part(seed, group.rank())):
        yield

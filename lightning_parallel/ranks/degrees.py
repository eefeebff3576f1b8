"""The number of ranks of each kind of parallelism: arithmetic and checks only, no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Literal

from lightning_parallel.errors import check
from lightning_parallel.ranks.divisibility import divisors, listed

Degree = int | Literal["auto", "node"]
"""A number of ranks; ``"node"`` is the ranks of one machine; ``"auto"`` is derived (see :class:`Degrees`)."""


@dataclass(frozen=True, kw_only=True)
class Degrees:
    """The number of ranks on each axis; their product is the number of all ranks.

    ``"node"`` stands for the ranks of one machine. ``"auto"`` is, by axis:

    - ``shard``: all ranks divided by the product of the other degrees;
    - ``replicate``: one group a machine; on a single machine two groups (one, if it has one rank);
    - ``tensor``: a whole machine where there are several; on a single machine two ranks (one, if it has one).

    Args:
        replicate: Ranks that hold equal copies of the same parameters (DDP, the outer axis of HSDP).
        shard: Ranks over which parameters, gradients and optimizer state are sharded.
        context: Ranks that share one sequence.
        tensor: Ranks that share one matrix product.
        pipeline: Ranks that share the stack of layers, stage by stage.

    Example:
        >>> Degrees(replicate="auto").resolve(8, local_world_size=4)
        Degrees(replicate=2, shard=4, context=1, tensor=1, pipeline=1)
    """

    replicate: Degree = 1
    shard: Degree = "auto"
    context: Degree = 1
    tensor: Degree = 1
    pipeline: Degree = 1

    def resolve(self, world_size: int, local_world_size: int | None = None) -> Degrees:
        """Return a copy in which every degree is a number and the product is `world_size`.

        Args:
            world_size: The number of all ranks.
            local_world_size: The ranks on one machine; all of them, if not given.

        Raises:
            ConfigurationError: With every degree that is not possible, and the possible values.
        """
        local = local_world_size or world_size
        check(self._malformed())
        numbers = {name: _number(name, degree, world_size, local) for name, degree in self._items()}
        # ``shard`` comes last, as its ``"auto"`` depends on all others.
        others = math.prod(number for name, number in numbers.items() if name != "shard" and number is not None)
        if numbers["shard"] is None:
            check(self._not_dividing(numbers, others, world_size))
            numbers["shard"] = world_size // others
        check(self._not_multiplying(numbers, world_size))
        return replace(self, **numbers)  # type: ignore[arg-type]

    @property
    def data(self) -> int:
        """Ranks that read different samples: ``replicate`` x ``shard``. Only of resolved degrees."""
        assert isinstance(self.replicate, int)
        assert isinstance(self.shard, int)
        return self.replicate * self.shard

    def _items(self) -> list[tuple[str, Degree]]:
        return [(field.name, getattr(self, field.name)) for field in fields(self)]

    def _malformed(self) -> list[str]:
        autos = ("replicate", "shard", "tensor")
        found = []
        for name, degree in self._items():
            words = "'auto' or 'node'" if name in autos else "'node'"
            is_count = isinstance(degree, int) and not isinstance(degree, bool) and degree >= 1
            if not (is_count or degree == "node" or (degree == "auto" and name in autos)):
                found.append(f"{name}={degree!r} is not a degree; give a number of ranks of at least 1, or {words}")
        return found

    def _not_dividing(self, numbers: dict[str, int | None], others: int, world_size: int) -> list[str]:
        if world_size % others == 0:
            return []
        given = _product(numbers)
        if sum(1 for number in numbers.values() if number not in (None, 1)) == 1:
            name, number = next((n, v) for n, v in numbers.items() if v not in (None, 1))
            return [
                f"{name}={number} does not divide {world_size} ranks; possible for {name}: "
                f"{listed(divisors(world_size))}{_odd_hint(name, number, world_size)}"
            ]
        return [
            f"{given} = {others} ranks do not divide the {world_size} there are; "
            f"possible products: {listed(divisors(world_size))}"
        ]

    def _not_multiplying(self, numbers: dict[str, int | None], world_size: int) -> list[str]:
        product = math.prod(number or 1 for number in numbers.values())
        if product == world_size:
            return []
        rest = product // (numbers["shard"] or 1)
        divided = f"shard={world_size // rest}" if world_size % rest == 0 else ""
        legal = divided or f"degrees out of {listed(divisors(world_size))}"
        return [
            f"{_product(numbers)} = {product} ranks, but there are {world_size}; "
            f"give {legal}, shard='auto', or start {product} processes"
        ]


def reshard_violations(reshard: str | int, shard: int) -> list[str]:
    """Reasons why `reshard` is not possible; empty if it is.

    Args:
        reshard: The setting, as given.
        shard: The number of ranks over which parameters are sharded.
    """
    if reshard in ("always", "never"):
        return []
    if isinstance(reshard, int) and not isinstance(reshard, bool) and reshard >= 1 and shard % reshard == 0:
        return []
    return [
        f"reshard={reshard!r} is not possible with shard={shard}; give 'always', 'never', "
        f"or a number of ranks that divides {shard}: {listed(divisors(shard))}"
    ]


def _number(name: str, degree: Degree, world_size: int, local: int) -> int | None:
    if degree == "node":
        return local
    if degree != "auto":
        return degree
    if name == "shard":
        return None
    num_nodes = world_size // local
    # Traffic within a machine is faster than between machines: ``tensor`` stays inside, copies are one a machine. On a
    # single machine two is the least number with an effect, so that the preset can be tried anywhere.
    if name == "replicate":
        return num_nodes if num_nodes > 1 else min(2, world_size)
    return local if num_nodes > 1 else min(2, local)


def _product(numbers: dict[str, int | None]) -> str:
    named = [f"{name} {number}" for name, number in numbers.items() if number is not None and number != 1]
    return " x ".join(named) or "all degrees 1"


def _odd_hint(name: str, number: int | None, world_size: int) -> str:
    if name == "replicate" and number == 2 and world_size % 2:
        return "; two groups need an even number of devices (fsdp_custom takes any number)"
    return ""

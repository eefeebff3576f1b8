"""Random numbers of samples, handed out again to parts of them: private names of torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_OF_EACH = {
    "bernoulli", "cauchy", "exponential", "geometric", "log_normal", "normal", "poisson", "rand", "rand_like",
    "randint", "randint_like", "randn", "randn_like", "random", "uniform",
}  # fmt: skip
"""Operations that draw each number of their result by itself, without the underscore of those in place."""

Unchanged = Callable[[], contextlib.AbstractContextManager[Any]]


class SampleDraws:
    """Keeps the random numbers of a step on some samples, for steps on parts of them.

    Args:
        number: The number of samples.
        unchanged: A context at whose end the random state is what it was before.
    """

    def __init__(self, number: int, unchanged: Unchanged) -> None:
        self._number, self._unchanged = number, unchanged
        self._kept: list[tuple[Draw, Tensor]] = []
        self.parted = False
        """Whether a step on a part has drawn otherwise than that on all samples, or more often, or less."""

    @contextlib.contextmanager
    def keeping(self) -> Iterator[None]:
        """Inside this context, what the step on all samples draws is kept."""
        self._kept = []
        with _Draws(self._keep):
            yield

    @contextlib.contextmanager
    def handing_out(self, first: int, number: int) -> Iterator[None]:
        """Inside this context, a step on a part draws what its samples have drawn before.

        Args:
            first: The first sample of the part.
            number: The number of its samples.
        """
        draws = iter(self._kept)

        def hand_out(draw: Draw) -> Tensor:
            with self._unchanged():
                result = draw.run()
            kept_draw, kept = next(draws, (draw, None))
            values = None
            if kept is not None and (kept_draw.name, kept_draw.numbers) == (draw.name, draw.numbers):
                values = self._rows(kept, result, first, number)
            self.parted |= values is None
            return result if values is None else result.copy_(values)

        with _Draws(hand_out):
            yield
        self.parted |= next(draws, None) is not None

    def _keep(self, draw: Draw) -> Tensor:
        result = draw.run()
        self._kept.append((draw, result.detach().clone()))
        return result

    def _rows(self, kept: Tensor, result: Tensor, first: int, number: int) -> Tensor | None:
        """The numbers of a part among those of all samples; ``None`` if it draws otherwise."""
        if kept.dtype != result.dtype or kept.ndim != result.ndim:
            return None
        others = [each for each in range(kept.ndim) if kept.shape[each] != result.shape[each]]
        if not others:
            return kept  # the numbers are of no sample
        (dim, *more) = others
        if more or kept.shape[dim] != self._number or result.shape[dim] != number:
            return None
        return kept.narrow(dim, first, number)


@dataclass(frozen=True)
class Draw:
    """An operation that draws.

    Args:
        name: Its name.
        numbers: What it was given beside shapes and tensors, such as the number below which it draws.
        run: Draws.
    """

    name: str
    numbers: tuple[float, ...]
    run: Callable[[], Tensor]


class _Draws(TorchDispatchMode):
    """Lets `instead` draw.

    `torch.utils._python_dispatch.TorchDispatchMode`, since 1.12, and the schema of an operation, `_schema`, have no
    public spelling.
    """

    def __init__(self, instead: Callable[[Draw], Tensor]) -> None:
        super().__init__()
        self._instead = instead

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def run() -> Any:
            return func(*args, **(kwargs or {}))

        name = func._schema.name.removeprefix("aten::").removesuffix("_")
        if torch.Tag.nondeterministic_seeded not in func.tags or name not in _OF_EACH:
            return run()
        numbers = tuple(each for each in args if isinstance(each, int | float))
        return self._instead(Draw(func._schema.name, numbers, run))

"""Writes of a step into parameters, which a pipeline would make once for each microbatch: refused in words."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional

from lightning_parallel import _torch
from lightning_parallel.errors import ConfigurationError
from lightning_parallel.module.differences import first_of
from lightning_parallel.module.placeholders import is_placeholder
from lightning_parallel.ranks.dtensors import local_of

ALWAYS = 4
"""Steps that are looked at one after the other; afterwards those whose number is a power of two."""
_PIECE = 1 << 14


class WrittenParameters:
    """Looks whether a step has written into the parameters that this rank holds.

    Operations in place and ``parameter.data = values`` are seen in each step. What is written through
    ``parameter.data`` in place is seen in its values only, which are compared in the first steps, and then ever more
    rarely; that of gathered copies is not seen.

    Args:
        module: The module.
        group: The ranks of the pipeline, for host memory.
        waiting: Makes a context for each wait for another rank.

    Example:
        >>> written = WrittenParameters(module, group)
        >>> with written.checked():
        ...     ...  # a step
    """

    def __init__(
        self,
        module: nn.Module,
        group: ProcessGroup,
        waiting: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        self._module, self._group, self._waiting = module, group, waiting
        self._num_steps = 0
        units = [unit for unit in module.modules() if isinstance(unit, FSDPModule)]
        self._gathered = [each for unit in units for each in _torch.unit_parameters.gathered_of(unit)]
        self._before: list[tuple[str, Tensor, int, int]] = []
        self._sums = torch.zeros(0)

    @contextlib.contextmanager
    def checked(self) -> Iterator[None]:
        """Refuse a step in this context that writes. A collective where values are compared.

        Raises:
            ConfigurationError: With the names of the parameters.
        """
        self._note()
        yield
        self._check()

    def _note(self) -> None:
        self._num_steps += 1
        held = list(self._held())
        self._before = [(name, p, p._version, local_of(p).data_ptr()) for name, p in held]
        self._sums = _sums([p for _, p in held]) if self._is_due else torch.zeros(0)
        for each in self._gathered:
            each.was_marked()

    def _check(self) -> None:
        names = [n for n, p, version, place in self._before if (p._version, local_of(p).data_ptr()) != (version, place)]
        if places := [each.place for each in self._gathered if each.was_marked()]:
            paths = {id(child): path for path, child in self._module.named_modules()}
            names += [f"{paths.get(id(holder), '')}.{name}".strip(".") for holder, name in places]
        if self._is_due:
            differs = _sums([p for _, p, *_ in self._before]) != self._sums
            names += [name for (name, *_), is_other in zip(self._before, differs.tolist(), strict=True) if is_other]
            is_any = torch.tensor(bool(names), dtype=torch.uint8)
            with self._waiting():
                dist.all_reduce(is_any, op=dist.ReduceOp.MAX, group=self._group)
            if is_any:
                found: list[list[str]] = [[]] * self._group.size()
                dist.all_gather_object(found, names, group=self._group)
                names = [name for of_stage in found for name in of_stage]
        if names:
            raise ConfigurationError([_WRITTEN.format(first_of(list(dict.fromkeys(names))))])

    @property
    def _is_due(self) -> bool:
        return self._num_steps <= ALWAYS or not self._num_steps & (self._num_steps - 1)

    def _held(self) -> Iterator[tuple[str, Tensor]]:
        """The parameters of this rank, but for those that `max_norm` shortens: no row is shortened twice."""
        for path, child in self._module.named_modules():
            for name, parameter in child.named_parameters(path, recurse=False):
                if not (is_placeholder(parameter) or getattr(child, "max_norm", None) is not None):
                    yield name, parameter


def _sums(parameters: list[Tensor]) -> Tensor:
    """A number of each parameter that is another one when its values are."""
    if not parameters:
        return torch.zeros(0)
    as_bytes = [local_of(p).detach().contiguous().reshape(-1).view(torch.uint8) for p in parameters]
    weights = torch.arange(1, 252, device=as_bytes[0].device)  # so that entries that change places count, too
    return torch.stack([_weighted(each, weights) for each in as_bytes])


def _weighted(values: Tensor, weights: Tensor) -> Tensor:
    """The sum of bytes, each times its weight, piece by piece: a sum of wide numbers copies what it adds up."""
    total = weights.new_zeros(())
    for piece in values.split(_PIECE * len(weights)):
        padded = functional.pad(piece, (0, -len(piece) % len(weights)))
        total += (padded.view(-1, len(weights)).sum(0, dtype=torch.int64) * weights).sum()
    return total


_WRITTEN = (
    "the step writes into {}, and a pipeline runs it once for each microbatch, so that the write would be made as "
    "often. Write in a hook, such as on_train_batch_end, keep it in a buffer, or give schedule='turns' or pipeline=1"
)

"""Writes of a step into gathered parameters: kept in the shards, where all ranks have written the same."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule

from lightning_parallel import _torch
from lightning_parallel.errors import ConfigurationError
from lightning_parallel.module.differences import first_of
from lightning_parallel.ranks.fingerprints import differing, of_parameters

ALWAYS = 4
"""Looks one after the other, before there are fewer: a teacher that begins as its student is equal to it at first."""
_UNWRITTEN, _WRITTEN, _LATE = range(3)


class StepWrites:
    """Brings what a step writes into gathered parameters to the shards, as momentum encoders do (He et al. 2020).

    A rank keeps shards, and FSDP2 gathers them anew: writes into what was gathered would be lost without a word.
    Operations in place and ``parameter.data = values`` are seen in each step. What is written through
    ``parameter.data`` in place is seen in its values only, which are compared in the first steps, and then ever more
    rarely: such parameters are written back in each step from then on.

    Args:
        module: The sharded module.
        units: Its units.
        group: The ranks that share parameters, with a backend for host memory.

    Example:
        >>> writes = StepWrites(module, units, group)
        >>> writes.begin()
        >>> writes.keep()  # between each forward and its backward
        >>> writes.after_backward()
    """

    def __init__(self, module: nn.Module, units: Sequence[nn.Module], group: ProcessGroup) -> None:
        self._module, self._group = module, group
        sharded = [unit for unit in units if isinstance(unit, FSDPModule)]
        self._parameters = [(each, unit) for unit in sharded for each in _torch.unit_parameters.gathered_of(unit)]
        self._num_looks = 0
        self._known: set[int] = set()
        self._stale: list[FSDPModule] = []
        self._drops = False

    def begin(self) -> None:
        """Note which parameters are trained. Call it before a step."""
        for each, _ in self._parameters:
            each.note_trained()

    def keep_trained(self) -> None:
        """Bring to the shards what a step has frozen or thawed while it was gathered. Call it behind a forward."""
        for each, _ in self._parameters:
            each.keep_trained()

    def keep_trained_until(self, loss: Tensor) -> None:
        """As `keep_trained`, also for what hooks set before the backward through `loss` begins."""
        self.keep_trained()
        if loss.grad_fn is not None:
            loss.grad_fn.register_prehook(lambda _: self.keep_trained())

    def keep(self) -> None:
        """Bring writes to the shards. Call it between forward and backward, on all ranks; a collective where it looks.

        Raises:
            ConfigurationError: If a write cannot be kept.
        """
        gathered = [index for index, (each, _) in enumerate(self._parameters) if each.is_gathered]
        marked = [index for index in gathered if self._parameters[index][0].was_marked()]
        if self._drops:
            for index in marked:
                self._parameters[index][0].take_back_memory()
            return
        self._num_looks += 1
        written = [index for index in gathered if index in self._known or index in marked]
        if self._parameters and (self._num_looks <= ALWAYS or not self._num_looks & (self._num_looks - 1)):
            written = self._agreed(gathered, written)
        for index in written:
            parameter, unit = self._parameters[index]
            if not parameter.keep():
                raise ConfigurationError([_ROUNDED.format(self._names([index]), *parameter.dtypes)])
            if parameter.take_back_memory():
                self._stale.append(unit)

    def after_backward(self) -> None:
        """Free what has other values than its shards; the next forward gathers it. Call it after a backward."""
        for unit in dict.fromkeys(self._stale):
            unit.reshard()
        self._stale.clear()

    @contextlib.contextmanager
    def dropped(self) -> Iterator[None]:
        """Inside this context, steps are trials, whose writes are not kept."""
        self._drops = True
        try:
            yield
        finally:
            self._drops = False

    def _agreed(self, gathered: Sequence[int], written: Sequence[int]) -> list[int]:
        """Of what is gathered, that which any rank has written. A collective."""
        kinds = [_UNWRITTEN] * len(self._parameters)
        for index in gathered:
            if index in written:
                kinds[index] = _WRITTEN
            elif self._parameters[index][0].differs():
                kinds[index] = _WRITTEN if self._num_looks <= ALWAYS else _LATE
        found = torch.tensor(kinds, dtype=torch.uint8)
        if self._group.size() > 1:
            dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._group)
        kinds = found.tolist()
        if late := [index for index, kind in enumerate(kinds) if kind == _LATE]:
            raise ConfigurationError([_LOST.format(self._names(late), self._num_looks // 2, self._num_looks)])
        agreed = [index for index in gathered if kinds[index]]
        if self._group.size() > 1 and any(kinds):
            self._check_equal(agreed)
        self._known.update(agreed)
        return agreed

    def _check_equal(self, written: Sequence[int]) -> None:
        # Clones: torch cannot free the memory of a tensor that numpy has seen.
        values = ((self._names([index]), self._parameters[index][0].whole.clone()) for index in written)
        if different := differing(list(of_parameters(values))):
            raise ConfigurationError([_DIFFER.format(first_of(sorted(different)))])

    def _names(self, indices: Sequence[int]) -> str:
        paths = {id(child): path for path, child in self._module.named_modules()}
        places = [self._parameters[index][0].place for index in indices]
        return first_of([f"{paths.get(id(holder), '')}.{name}".strip(".") for holder, name in places])


_INSTEAD = "Write in a hook, such as on_train_batch_end, where parameters are their shards, or give zero1_custom"
_LOST = (
    "the step writes into {} while they are gathered, in place through `parameter.data`, and has begun to between its "
    "runs {} and {}: each rank keeps its shard only, and what the first of these wrote is lost. Write by an operation "
    "in place under torch.no_grad(), or by `parameter.data = values`. " + _INSTEAD
)
_DIFFER = (
    "the step writes into {} while they are gathered, on each rank what its own samples give: the shards would be "
    "parts of different tensors. Write what all ranks have computed alike, such as means over ranks, or keep it in a "
    "buffer, which all ranks get from rank 0"
)
_ROUNDED = (
    "the step writes into {} while they are gathered in {}, but their shards are {}, which are rounded when they are "
    "gathered: small changes would be lost. " + _INSTEAD
)

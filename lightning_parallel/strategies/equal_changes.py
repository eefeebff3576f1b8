"""Ranks do the same to their parts of the same tensors: a look while a fit goes on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from typing_extensions import override

from lightning_parallel import _torch
from lightning_parallel._torch.written_numbers import Number
from lightning_parallel.errors import RanksDifferError, line_of_user
from lightning_parallel.module.placeholders import is_placeholder
from lightning_parallel.ranks.fingerprints import hash_of_names
from lightning_parallel.ranks.objects import of_all_ranks
from lightning_parallel.strategies.looks import Looks

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

_RATE = "the learning rate"
_ROUNDING = 1e-4
"""The difference, as a share of the numbers, that is not taken for that of other numbers."""
_ROUNDING_OF_COPIES = 5e-2
"""The same between ranks that compute the same samples: kernels may add in no fixed order, and round to 16 bits."""


class _Done(NamedTuple):
    """The times that something was done, the sum of the numbers it was done with, and that of their sizes."""

    times: int
    total: float
    size: float

    def equals(self, other: _Done, allowed: float, *, counts: bool) -> bool:
        if counts and self.times != other.times:
            return False
        own, others = max(self.times, 1), max(other.times, 1)
        first, second = self.total / own, other.total / others
        if first == second or (math.isnan(first) and math.isnan(second)):
            return True
        if not (math.isfinite(first) and math.isfinite(second)):
            return False
        return abs(first - second) <= allowed * max(self.size / own, other.size / others)


_NOTHING = _Done(0, 0.0, 0.0)


class _Updates:
    """The settings of one group of an optimizer in its updates; in the way of each of them, so that it costs little."""

    def __init__(self) -> None:
        self.times, self.num_gradients = 0, 0
        self.rate: float | Tensor = 0.0
        self.others = 0.0

    def add(self, group: Mapping[str, Any]) -> None:
        rate, parameters = group.get("lr"), group["params"]
        self.times += 1
        if rate is not None:  # some optimizers have none
            self.rate = self.rate + (rate.detach() if isinstance(rate, Tensor) else rate)
        self.others += sum([value for value in group.values() if type(value) is float])
        self.others += sum([value for value in group.get("betas", ()) if type(value) is float])
        # All of them, or none: who skips an update clears all gradients.
        self.num_gradients += bool(parameters) and parameters[0].grad is not None

    def done(self, number: int, label: str) -> dict[str, _Done]:
        """The settings, in words, and their numbers.

        Args:
            number: That of the group.
            label: The optimizer, in words.
        """
        totals = {
            _RATE: float(self.rate),
            "the sum of all settings": self.others,
            "the number of gradients of the first parameter": float(self.num_gradients),
        }
        return {
            f"{what} of group {number} of {label}": _Done(self.times, total, abs(total))
            for what, total in totals.items()
        }


class EqualChanges(Looks):
    """Ends a fit whose ranks change their parts of the same tensors differently, as by a number of their own samples.

    Where each rank has all parameters, the copies part, which `EqualCopies` finds. Where each has a part, none is
    compared with another: a learning rate that follows the loss of each rank's own samples, or gradients that are
    scaled by it, train parts of one tensor in different ways. So the numbers are compared with which user code writes
    into parameters, gradients and states, and those of the optimizers' groups in each update. What the package writes
    for the user, such as gradients that are clipped to a value of this rank's own, is not noted.

    Args:
        module: The module.
        readers: For each rank, a number that is equal on ranks that read the same samples.

    Example:
        >>> changes = EqualChanges(module, readers=[0, 1])
        >>> changes.look()  # before each batch
    """

    def __init__(self, module: LightningModule, readers: Sequence[int]) -> None:
        super().__init__(module)
        self._readers = readers
        self._done: dict[str, list[Any]] = {}
        self._updates: dict[str, list[_Updates]] = {}
        # Behind the update: the closure runs inside of it, and hooks there may set the rate.
        self._hook = register_optimizer_step_post_hook(self._note_update)

    def close(self) -> None:
        """Note no more updates."""
        self._hook.remove()

    def on_write(self, call: str, number: Number) -> None:
        """Note that user code has written into tensors of which this rank has parts.

        Args:
            call: What it has called.
            number: The numbers it was given.
        """
        line = line_of_user()
        self._note(f"{call} at {line.rpartition('/')[2]}" if line else call, *number)

    def _note_update(self, optimizer: Optimizer, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        for index, own in enumerate(self._module.trainer.optimizers):
            if own is optimizer:
                label = f"optimizer {index} ({type(optimizer).__name__})"
                groups = self._updates.setdefault(label, [])
                groups += [_Updates() for _ in optimizer.param_groups[len(groups) :]]
                with _torch.modes.without_function_modes():  # else each look at the gradient of a shard costs
                    for updates, group in zip(groups, optimizer.param_groups, strict=False):
                        updates.add(group)

    def _note(self, what: str, total: float | Tensor, size: float | Tensor) -> None:
        done = self._done.setdefault(what, [0, 0.0, 0.0])
        done[0] += 1
        done[1] = done[1] + total
        done[2] = done[2] + size

    @override
    def compare(self) -> None:
        trainer, stage = self._module.trainer, self._stage()
        done = {what: _Done(times, float(total), float(size)) for what, (times, total, size) in self._done.items()}
        for label, groups in self._updates.items():
            for number, updates in enumerate(groups):
                done |= updates.done(number, label)
        self._done, self._updates = {}, {}
        of_ranks = of_all_ranks((stage, done))
        if (found := _first_difference(of_ranks, self._readers)) is not None:
            if trainer.global_rank != 0:
                raise RanksDifferError("ranks change their parts differently; rank 0 says how")
            raise RanksDifferError(_in_words(*found, of_ranks, trainer.global_step, self._agreed))
        self._agreed = trainer.global_step

    def _stage(self) -> int:
        """A number that is equal on ranks that have the same layers."""
        return hash_of_names(name for name, p in self._module.named_parameters() if not is_placeholder(p))


def _first_difference(
    of_ranks: list[tuple[int, Mapping[str, _Done]]], readers: Sequence[int]
) -> tuple[str, int, int] | None:
    """The first thing that was done differently, and two ranks that differ.

    Ranks of one stage do the same, as often; those of other stages have other parameters, and the same learning rates.
    """
    firsts: dict[int, int] = {}
    for rank, (stage, _) in enumerate(of_ranks):
        first = firsts.setdefault(stage, rank)
        same = first != rank
        other = first if same else 0
        (_, own), (_, known) = of_ranks[rank], of_ranks[other]
        allowed = _ROUNDING_OF_COPIES if readers[rank] == readers[other] else _ROUNDING
        what_all = dict.fromkeys((*known, *own)) if same else [each for each in known if each in own]
        for what in what_all:
            is_compared = same or what.startswith(_RATE)
            if is_compared and not known.get(what, _NOTHING).equals(own.get(what, _NOTHING), allowed, counts=same):
                return what, other, rank
    return None


def _in_words(what: str, first: int, other: int, of_ranks: list[Any], step: int, agreed: int | None) -> str:
    one, another = (_done_in_words(of_ranks[rank][1].get(what)) for rank in (first, other))
    return _DIFFERENT.format(what, first, one, other, another, agreed or 0, step)


def _done_in_words(done: _Done | None) -> str:
    if done is None:
        return "never"
    return f"{done.times} time{'s' if done.times > 1 else ''}, with {done.total / done.times:.6g} on average"


_DIFFERENT = (
    "after step {6}, ranks have changed their parts of the same tensors differently since step {5}: {0} was used on "
    "rank {1} {2}, and on rank {3} {4}. Nothing later than step {5} is to be trusted. A number that a rank takes from "
    "its own samples, such as a loss, is another one on each rank, and so is what is decided by it, or drawn at random "
    "after ranks have drawn differently: take that of all, such as self.all_gather(loss).mean(), draw by "
    "torch.randn_like(parameter), and do the same on all ranks"
)

"""Whether a loss for which ranks meet, as a contrast of gathered outputs, is that of one process with all samples.

Both are computed: the ranks take their samples as they do in a step, and then each takes those of all by itself, as if
there were no other ranks. A gather that brings no gradient back, or a statistic of the own samples, shows in this.
"""

from __future__ import annotations

import contextlib
import math
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_parallel import _torch
from lightning_parallel.module.differences import Tolerance
from lightning_parallel.module.kept_state import KeptState
from lightning_parallel.ranks.objects import of_all_ranks
from lightning_parallel.strategies.plain_step import PlainSteps
from lightning_parallel.techniques.pipeline.microbatches import batch_size_of, cut_batch

_MOST_SAMPLES = 64
"""Samples of all ranks together, at most, as each rank computes with all of them."""
_FEWEST, _MOST = 2, 4
"""Samples of each rank: a contrast needs two."""
_SAME_DIRECTION = 0.999
"""The cosine from which on a gradient is another one only in its length."""


def gathered_loss(
    plain: PlainSteps,
    group: dist.ProcessGroup,
    tolerance: Tolerance,
    least: float,
    set_mode: Callable[[nn.Module], object],
    *,
    has_gradients: bool,
) -> str | None:
    """The loss of one process with all samples beside the mean over ranks that gather, in words. A collective.

    Args:
        plain: The steps of a copy; the last one is looked at.
        group: The ranks that read different samples.
        tolerance: The differences that rounding explains.
        least: The share of the norm of all gradients from which on another gradient is told of.
        set_mode: Brings the copy into the mode in which its step is run.
        has_gradients: Whether gradients are compared, too.

    Returns:
        The words; empty if the two are the same, and ``None`` if nobody can say.
    """
    trial = _GatheredTrial(plain, group, set_mode)
    try:
        return trial.words(tolerance.value, max(least, tolerance.gradient), has_gradients=has_gradients)
    finally:
        trial.undo()


class _GatheredTrial:
    """Runs of one step on some samples of each rank, and on those of all ranks by one rank.

    Args:
        plain: The steps of a copy.
        group: The ranks that read different samples.
        set_mode: Brings the copy into the mode in which its step is run.
    """

    def __init__(self, plain: PlainSteps, group: dist.ProcessGroup, set_mode: Callable[[nn.Module], object]) -> None:
        self._plain, self._group, self._set_mode = plain, group, set_mode
        self._before = KeptState(plain.module, plain.written)
        self._is_in_vain = False
        plain.draws = False

    def undo(self) -> None:
        """Leave the copy as it was."""
        self._before.restore()

    def words(self, near: float, least: float, *, has_gradients: bool) -> str | None:
        """The difference in words; empty if there is none, and ``None`` if nobody can say."""
        self._plain.take_gradients()
        own, whole = self._samples()
        if self._goes_not_on():
            return None
        loss = self._loss_of(own, 1.0 if has_gradients else 0.0)
        if self._goes_not_on():
            return None
        losses = self._of_group(loss)
        norm = self._take_mean() if has_gradients else 0.0
        with self._one_process():
            expected = self._loss_of(whole, -1.0 if has_gradients else 0.0)
            distance = _norm(self._plain.module)  # of the mean over ranks from it, since gradients add up
            self._plain.take_gradients()
            if has_gradients and not self._is_in_vain:
                self._loss_of(whole, 1.0)
            one = _norm(self._plain.module)
            self._plain.take_gradients()
        if self._goes_not_on():
            return None
        mean = sum(losses) / len(losses)
        if abs(mean - expected) > near * max(map(abs, (expected, *losses))):
            return _LOSS.format(mean=mean, whole=expected, num_ranks=len(losses))
        return _gradient_in_words(norm, one, distance, least, len(losses)) if has_gradients else ""

    def _samples(self) -> tuple[Any, Any]:
        """Some samples of this rank, and those of all ranks in one batch. A collective."""
        batch, number = next(iter(self._plain.given[0]), None), 0
        with contextlib.suppress(ValueError):
            number = batch_size_of(batch)
        numbers, most = of_all_ranks(number), min(_MOST, _MOST_SAMPLES // self._group.size())
        count = next((each for each in range(most, _FEWEST - 1, -1) if number and number % each == 0), 0)
        if len(set(numbers)) > 1 or not count:  # else, ranks would meet with other shapes
            self._is_in_vain = True
            return None, None
        own, whole = batch if count == number else cut_batch(batch, number, number // count)[0], None
        with self._tried():
            data = pickle.dumps(move_data_to_device(own, torch.device("cpu")))
        if self._goes_not_on():
            return None, None
        batches = self._of_group(data)
        with self._tried():
            whole = move_data_to_device(_joined([pickle.loads(each) for each in batches], count), self._plain.device)
        return own, whole

    @contextlib.contextmanager
    def _tried(self) -> Iterator[None]:
        """Note that nobody can say, in place of an error of code that was not made for this."""
        try:
            yield
        except Exception:
            self._is_in_vain = True

    def _of_group(self, own: Any) -> list[Any]:
        found = [own] * self._group.size()
        dist.all_gather_object(found, own, group=self._group)
        return found

    def _goes_not_on(self) -> bool:
        return any(of_all_ranks(self._is_in_vain))

    def _loss_of(self, batch: Any, times: float) -> float:
        plain = self._plain
        self._before.restore()
        loss = None
        # The user's code, to which another batch, the mode or a single rank is news.
        with self._tried(), torch.set_grad_enabled(times != 0.0):
            self._set_mode(plain.module)
            loss = plain.run_forward((batch, *plain.given[0][1:]), plain.given[1], times).loss
        self._is_in_vain |= plain.draws or loss is None or loss.numel() != 1
        value = math.nan if loss is None or self._is_in_vain else float(loss)
        self._is_in_vain |= not math.isfinite(value)
        return value

    def _take_mean(self) -> float:
        """Take the mean over the ranks of each gradient, in place; returns the norm of all. A collective."""
        for parameter in self._plain.module.parameters():
            if parameter.requires_grad:
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.to_dense()
                dist.all_reduce(gradient, group=self._group)
                parameter.grad = gradient.div_(self._group.size())
        return _norm(self._plain.module)

    @contextlib.contextmanager
    def _one_process(self) -> Iterator[None]:
        """Inside this context, steps of the copy find no other ranks, and end where they look for them by name."""
        plain, trainer = self._plain, vars(self._plain.module.trainer)
        alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        of_one = {"world_size": 1, "global_rank": 0, "strategy": _OneProcess(trainer["_trainer"].strategy)}
        kept, group = {name: trainer[name] for name in of_one if name in trainer}, plain.group
        trainer.update(of_one)
        plain.group = alone
        try:
            with _torch.groups.collectives_checked(_refuse_other_ranks):
                yield
        finally:
            plain.group = group
            for name in of_one:
                del trainer[name]
            trainer.update(kept)
            dist.destroy_process_group(alone)


class _OneProcess:
    """A strategy as a process without others would have it.

    Args:
        strategy: The real one.
    """

    def __init__(self, strategy: Any) -> None:
        self._strategy, self.world_size, self.global_rank = strategy, 1, 0

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """The values of a group of one rank: ``[1, ...]``."""
        return tensor[None] if sync_grads else tensor.detach()[None]

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """The value itself."""
        return tensor

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """The decision itself."""
        return decision

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """The object itself."""
        return obj

    def barrier(self, name: str | None = None) -> None:
        """Nobody is waited for."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._strategy, name)


def _refuse_other_ranks(name: str, group: dist.ProcessGroup | None, op: object) -> None:
    if group is not None and group is not dist.group.WORLD and group.size() > 1:
        raise RuntimeError(f"{name} over a group of {group.size()} ranks")


def _joined(batches: Sequence[Any], size: int) -> Any:
    """One batch of the samples of several, as `cut_batch` would cut it.

    Args:
        batches: Of one structure, each with `size` samples.
        size: The number of samples of each.

    Raises:
        ValueError: If they have something else than samples, and it differs.
        RuntimeError: If their samples have other shapes, as torch says it.
    """
    first = batches[0]
    if isinstance(first, Tensor) and first.ndim and all(len(each) == size for each in batches):
        return torch.cat(list(batches))
    if type(first) in (list, tuple) and all(len(each) == len(first) for each in batches):
        if (
            type(first) is list
            and len(first) == size
            and all(isinstance(item, str | bytes | int | float) for item in first)
        ):
            return [item for each in batches for item in each]
        return type(first)(_joined(items, size) for items in zip(*batches, strict=True))
    if type(first) is dict and all(each.keys() == first.keys() for each in batches):
        return {key: _joined([each[key] for each in batches], size) for key in first}
    same = all(torch.equal(each, first) if isinstance(first, Tensor) else each == first for each in batches)
    if same:
        return first
    raise ValueError("other values on other ranks")


def _norm(module: LightningModule) -> float:
    return math.hypot(*(float(p.grad.norm()) for p in module.parameters() if p.grad is not None))


def _gradient_in_words(norm: float, one: float, distance: float, least: float, num_ranks: int) -> str:
    if not math.isfinite(norm + one + distance) or distance <= least * one:
        return ""
    cosine = (norm**2 + one**2 - distance**2) / (2 * norm * one) if norm and one else 0.0
    if cosine >= _SAME_DIRECTION:
        return _LENGTH.format(times=norm / one, num_ranks=num_ranks)
    return _DIRECTION.format(distance=distance / one, num_ranks=num_ranks)


_GATHER = (
    "Gather with self.all_gather(value, sync_grads=True), which brings gradients back to the ranks that values come "
    "from; torch.distributed.all_gather does not"
)
_LOSS = (
    "the loss for which {num_ranks} ranks meet ({mean:.5g} on some of their samples, as a mean over the ranks) is not "
    "that of one process with all of these samples ({whole:.5g}). What one process computes of its batch, such as the "
    "statistics of a normalization or the number of samples, compute of what is gathered"
)
_LENGTH = (
    "the gradient of a loss for which {num_ranks} ranks meet is {times:.3g} times that of one process with all "
    "samples. " + _GATHER
)
_DIRECTION = (
    "the gradient of a loss for which {num_ranks} ranks meet differs from that of one process with all samples, by "
    "{distance:.1e} of its norm. " + _GATHER
)

"""Whether the mean of the losses of ranks is the loss of all of their samples, as it is for means over samples.

The first step compares a rank with one process that has the samples of that rank. What one process would do with those
of all ranks is seen on parts of a batch: where its loss is not the mean of theirs, the mean over ranks is another one.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn

from lightning_parallel import _torch
from lightning_parallel.module.differences import Tolerance, first_of
from lightning_parallel.module.kept_state import KeptState
from lightning_parallel.ranks.objects import of_all_ranks
from lightning_parallel.ranks.random_streams import unchanged_generators
from lightning_parallel.strategies.gathered_loss import gathered_loss
from lightning_parallel.strategies.plain_step import PlainSteps, dense
from lightning_parallel.techniques.pipeline.microbatches import batch_size_of, cut_batch

_MOST_SAMPLES = 8
"""Samples that are looked at, at most: a few show it, and a step takes many. A batch of 11 has no such part."""
_MOST_FOR_GRADIENTS = 4
_SAME_GRADIENT = 2e-2
"""The share of a gradient's norm up to which a choice at its edge may move it, at least."""
_NO_GRADIENT = 1e-5
"""The share of the norm of all gradients below which one is rounding itself, as those of biases of keys."""


def tell_other_layers(module: LightningModule, num_ranks: int) -> None:
    """Say which layers compute with what they see of all samples, of which each rank sees its own.

    Args:
        module: The module.
        num_ranks: The ranks that read different samples.
    """
    if by_frequency := _scaled_by_frequency(module):
        rank_zero_info(_BY_FREQUENCY.format(first_of(by_frequency), num_ranks=num_ranks))
    if paths := [path for path, child in module.named_modules() if _takes_statistics(child)]:
        rank_zero_info(_OF_BATCHES.format(first_of(paths), num_ranks=num_ranks))


def looks_at_losses(module: LightningModule) -> bool:
    """Whether the loss of a step can be looked at: no callback weights it."""
    callbacks: Sequence[object] = module.trainer.callbacks  # type: ignore[attr-defined]
    return not any(getattr(each, "weighs_losses", False) for each in callbacks)


def other_loss(trial: LossTrial, group: dist.ProcessGroup, tolerance: Tolerance, *, has_gradients: bool) -> str | None:
    """The loss of one process with all samples beside the mean over ranks, in words. A collective.

    Args:
        trial: Runs of the step on the samples of this rank.
        group: The ranks that read different samples.
        tolerance: The differences that rounding explains.
        has_gradients: Whether gradients are looked at, too, where losses are the same.

    Returns:
        The words of the first rank that has some; empty if the two are the same, and ``None`` if nobody can say.
    """
    words = _words_of(trial, group.size(), tolerance, has_gradients=has_gradients)
    trial.undo()
    if trial.plain.optimizers is None and all(of_all_ranks(trial.meets and not trial.fails)):
        return gathered_loss(trial.plain, group, tolerance, _SAME_GRADIENT, trial.set_mode, has_gradients=has_gradients)
    found = of_all_ranks((words, trial.is_in_vain))
    told = next((each for each, _ in found if each), "")
    return None if not told and any(is_in_vain for _, is_in_vain in found) else told


def _words_of(trial: LossTrial, num_ranks: int, tolerance: Tolerance, *, has_gradients: bool) -> str:
    near = tolerance.value
    if any(of_all_ranks(trial.fails)):  # before a step runs, in which ranks may meet
        return ""
    first = trial.losses_of(trial.parts[:1])
    if any(of_all_ranks(trial.has_no_loss)):
        trial.compute_as_in_training()
        first = trial.losses_of(trial.parts[:1])
    ranks = of_all_ranks((trial.plain.draws, trial.meets))
    if any(draws for draws, _ in ranks) and not any(meets for _, meets in ranks):
        trial.hand_out_draws()
        first = trial.losses_of(trial.parts[:1])
    if any(of_all_ranks(trial.is_in_vain)):  # all ranks alike, as a step may meet others before that is seen
        return ""
    losses = first + trial.losses_of(trial.parts[1:])
    words = ""
    if any(of_all_ranks(trial.may_differ(losses, near))):
        whole = trial.losses_of([trial.samples])[0]
        words = "" if trial.is_in_vain else _words(whole, losses, num_ranks, near)
        if trial.hands_out and words and not words.startswith(_SUM[: _SUM.index("{")]):
            words, trial.fails = "", True  # so do numbers that go to other samples than they were drawn for
    if has_gradients and not any(of_all_ranks(words)):
        found = trial.differing_gradients(more_than=max(_SAME_GRADIENT, tolerance.gradient))
        names = first_of(sorted(found, key=lambda name: -found[name]))
        words = _GRADIENTS.format(names, most=max(found.values()), num_ranks=num_ranks) if found else ""
    return words


def _scaled_by_frequency(module: nn.Module) -> list[str]:
    return [path for path, child in module.named_modules() if getattr(child, "scale_grad_by_freq", False)]


def _takes_statistics(layer: nn.Module) -> bool:
    """Whether a layer normalizes with the mean and variance of the samples that it is given."""
    is_norm = isinstance(layer, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d))  # not `nn.SyncBatchNorm`
    return is_norm and (layer.training or layer.running_mean is None)


@dataclass(frozen=True)
class _Samples:
    """Some consecutive samples of a batch.

    Args:
        batch: A batch of them.
        first: The number of the first one in the whole batch.
        number: How many there are.
    """

    batch: Any
    first: int
    number: int


def train_without_chance(module: nn.Module) -> None:
    """Bring a module into training, but for layers without parts, such as dropout and normalization."""
    module.train()
    for child in module.modules():
        if child is not module and (isinstance(child, nn.MultiheadAttention) or not any(child.children())):
            child.train(False)  # as `Module.eval` does, whose name some modules give to something else


class LossTrial:
    """Runs of one step, each from where the first one begins, without dropout and without statistics of batches.

    Args:
        plain: The steps of a copy.
        loss: The loss of the last one.
    """

    def __init__(self, plain: PlainSteps, loss: Tensor | None) -> None:
        self.plain = plain
        self._before = KeptState(plain.module, plain.written)
        self._batch = batch = next(iter(plain.given[0]), None)
        self.samples, self.parts = _cut(batch, _MOST_SAMPLES)
        self._draws: _torch.sample_draws.SampleDraws | None = None
        self._num_backwards: int | None = None
        self._has_graph = plain.optimizers is not None
        # That of another run, which differs where a layer does something else in training: then, the whole is run, too.
        is_comparable = self.samples.batch is batch and not plain.draws and plain.optimizers is None
        self._known = float(loss) if is_comparable and loss is not None and loss.numel() == 1 else None
        self.fails = not self.parts
        """Whether the losses say nothing: of random numbers, or of a step that cannot run."""
        self.meets = False
        """Whether the step meets other ranks, so that parts of its batch say nothing."""
        self.has_no_loss = False
        """Whether the step has ended in an error, or without a finite loss."""
        self.set_mode: Callable[[nn.Module], object] = nn.Module.eval
        """Brings the copy into the mode in which the step is run."""
        plain.draws = False

    @property
    def is_in_vain(self) -> bool:
        """Whether parts of the batch say nothing."""
        return self.fails or self.meets

    @property
    def hands_out(self) -> bool:
        """Whether parts get the random numbers of all samples."""
        return self._draws is not None

    def compute_as_in_training(self) -> None:
        """Begin again in training, for steps whose module computes no loss in evaluation, as detectors do.

        With a graph, too: the step may ask for gradients by itself, to weight losses by them.
        """
        self.set_mode, self._has_graph = train_without_chance, True
        self.fails, self.has_no_loss, self.plain.draws = not self.parts, False, False

    def hand_out_draws(self) -> None:
        """Begin again with the random numbers of one step on all samples, of which each part gets its own."""
        unchanged = functools.partial(unchanged_generators, self.plain.device)
        self._draws = _torch.sample_draws.SampleDraws(self.samples.number, unchanged)
        with self._draws.keeping(), self._without_backward():
            self._known = self._run(self.samples)
        self.fails, self.plain.draws = not self.parts or self.has_no_loss, False

    def losses_of(self, parts: Sequence[_Samples]) -> list[float]:
        """The losses of the step on some samples each."""
        with self._without_backward():
            return [self._loss_of(part) for part in parts]

    def may_differ(self, losses: Sequence[float], near: float) -> bool:
        """Whether the loss of all samples has to be known: it may be another one than the mean of `losses`."""
        if self.is_in_vain or not losses:
            return False
        return self._known is None or bool(_words(self._known, losses, num_ranks=1, near=near))

    def differing_gradients(self, more_than: float) -> dict[str, float]:
        """Name of a parameter -> how far the gradient of some samples is from the mean of those of their parts.

        As a share of its norm. A router that has hardly learned gives all samples nearly the same: the loss of how
        evenly it chooses is then the mean of those of parts but for rounding, and its gradient is another one.

        Args:
            more_than: The share from which on they differ.
        """
        samples, parts = _cut(self._batch, _MOST_FOR_GRADIENTS)
        if self.is_in_vain or self.hands_out or not parts:
            return {}
        self.plain.take_gradients()
        self._loss_of(samples, 1.0)
        norms = _norms(self.plain.module)
        for part in parts:
            self._loss_of(part, -1.0 / len(parts))
        apart = _norms(self.plain.module)
        self.plain.take_gradients()
        if self.is_in_vain or not math.isfinite(math.hypot(*norms.values(), *apart.values())):
            return {}
        least = _NO_GRADIENT * math.hypot(*norms.values())
        by_frequency = _scaled_by_frequency(self.plain.originals)
        norms = {name: norm for name, norm in norms.items() if name.rpartition(".")[0] not in by_frequency}
        found = {name: apart[name] / norm for name, norm in norms.items() if norm > least}
        return {name: each for name, each in found.items() if each > more_than}

    def undo(self) -> None:
        """Leave the copy as it was."""
        self._before.restore()

    def _loss_of(self, samples: _Samples, times: float = 0.0) -> float:
        draws = (
            contextlib.nullcontext() if self._draws is None else self._draws.handing_out(samples.first, samples.number)
        )
        with draws:
            value = self._run(samples, times)
        self.fails |= self.plain.draws or self.has_no_loss or (self._draws is not None and self._draws.parted)
        return math.nan if self.is_in_vain else value

    def _run(self, samples: _Samples, times: float = 0.0) -> float:
        """The loss of a run, or no number."""
        plain = self.plain
        self._before.restore()
        try:
            self.set_mode(plain.module)
            # What is compiled for the first time under a mode is never compiled again.
            with torch.compiler.set_stance("force_eager"), _torch.groups.collectives_checked(self._note_meeting):
                loss = self._loss((samples.batch, *plain.given[0][1:]), plain.given[1], times)
        except Exception:  # of the user's code, to which a part of a batch, or the mode, is news
            loss = None
        value = math.nan if loss is None or loss.numel() != 1 else float(loss)
        self.has_no_loss |= not math.isfinite(value)
        return value

    def _loss(self, args: Sequence[Any], kwargs: dict[str, Any], times: float) -> Tensor | None:
        """The loss that the step returns, or the sum of those from which it goes backward up to its first update."""
        optimizers = self.plain.optimizers
        if optimizers is None:
            return self.plain.run_forward(args, kwargs, times).loss
        optimizers.begin(runs_backward=False)
        self.plain.run_forward(args, kwargs)
        number, self._num_backwards = self._num_backwards, len(optimizers.losses)
        # A step that cuts its batch by itself goes backward less often on a part of it.
        return None if number not in (None, self._num_backwards) else torch.stack(optimizers.losses).sum()

    def _without_backward(self) -> contextlib.AbstractContextManager[object]:
        # A step that goes backward by itself may ask for gradients of its inputs, too.
        return torch.set_grad_enabled(self._has_graph)

    def _note_meeting(self, name: str, group: dist.ProcessGroup | None, op: object) -> None:
        self.meets = True


def _norms(module: nn.Module) -> dict[str, float]:
    named = [(name, dense(p.grad)) for name, p in module.named_parameters() if p.grad is not None]
    return {name: float(gradient.norm()) for name, gradient in named}


def _cut(batch: Any, most: int) -> tuple[_Samples, list[_Samples]]:
    """Some of the samples of a batch, and equal parts of them, of two samples if that can be; none if it cannot."""
    try:
        size = batch_size_of(batch)
    except ValueError:
        return _Samples(batch, 0, 0), []
    count = next((number for number in range(most, 1, -1) if size % number == 0), 0)
    if not count:
        return _Samples(batch, 0, size), []
    samples = batch if count == size else cut_batch(batch, size, size // count)[0]
    parts = cut_batch(samples, count, count // 2 if count % 2 == 0 and count > 2 else count)
    each = count // len(parts)
    return _Samples(samples, 0, count), [_Samples(part, each * index, each) for index, part in enumerate(parts)]


def _words(whole: float, losses: Sequence[float], num_ranks: int, near: float) -> str:
    """The difference between the mean over ranks and one process, in words; empty if there is none."""
    total = sum(losses)
    most = near * max(map(abs, (whole, *losses)))
    if not math.isfinite(whole) or not math.isfinite(total) or abs(whole - total / len(losses)) <= most:
        return ""
    if abs(whole - total) <= most * len(losses):
        return _SUM.format(whole=whole, parts=" + ".join(f"{loss:.5g}" for loss in losses), num_ranks=num_ranks)
    return _OTHER.format(whole=whole, mean=total / len(losses), num_ranks=num_ranks)


_BY_FREQUENCY = (
    "{} divides gradients by how often each row is taken, which each of the {num_ranks} ranks that read different "
    "samples counts in its own: their mean is not the gradient of one process with all samples. Leave "
    "scale_grad_by_freq out"
)
_OF_BATCHES = (
    "{} normalizes with statistics of its batch, which each of the {num_ranks} ranks that read different samples takes "
    "of its own: other numbers than those of one process with all samples, as under torch's DistributedDataParallel. "
    "On GPUs, give Trainer(sync_batchnorm=True); elsewhere, use a norm without them, such as nn.GroupNorm"
)
_SUM = (
    "the loss is a sum over samples ({whole:.5g} = {parts}, of parts of a batch), but gradients are averaged over the "
    "{num_ranks} ranks that read different samples, as under torch's DistributedDataParallel: each update is that of "
    "one process with 1/{num_ranks} of the loss. Divide the loss by the number of samples"
)
_GRADIENTS = (
    "the gradient of a batch is not the mean of those of its parts, by {most:.1e} of its norm for {}, so that the mean "
    "over the {num_ranks} ranks that read different samples is not that of one process with all of them, as under "
    "torch's DistributedDataParallel. Where a loss looks at how evenly a router chooses, take its choices of all ranks "
    "by self.all_gather(value, sync_grads=True)"
)
_OTHER = (
    "the loss of a batch ({whole:.5g}) is not the mean of the losses of its parts ({mean:.5g}), so that the mean over "
    "the {num_ranks} ranks that read different samples is not the loss of one process with all of them. Where it is a "
    "mean over tokens of which samples have different numbers, give the callback TokenWeighted; where it compares "
    "samples with each other, take those of all ranks by self.all_gather(value, sync_grads=True)"
)

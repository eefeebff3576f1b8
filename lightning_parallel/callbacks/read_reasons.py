"""Loaders that cannot be read ahead without changing a number, and those of which it is known that they can."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_parallel import _lightning
from lightning_parallel.callbacks.host_draws import HostDraws, has_drawn
from lightning_parallel.ranks.random_streams import RandomState

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

_DRAWING_ONCE = (
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    _lightning.epochs.SamplerWrapper,
)
"""Samplers that draw from default generators when they are begun, and never later."""

DATA_DRAWS = (
    "the data set, its sampler or what collates draws from a default generator of the main process, and reading ahead "
    "would change the order of the draws; let workers read (num_workers=1 or more), or give it a generator of its own"
)
TRAINING_DRAWS = (
    "training draws from Python's or NumPy's default generator, so that draws of the data set could not be told from "
    "its own; let workers read (num_workers=1 or more), with a sampler of torch's"
)


def reason_against(trainer: Trainer) -> str:
    """The reason why batches of training cannot be read ahead; empty if they can, as far as loaders show it."""
    training = _lightning.epochs.training_pass(trainer)
    loaders = [] if training is None else list(training.loaders)
    if len(loaders) > 1 and training is not None and training.mode not in ("min_size", "max_size"):
        return "some of several loaders begin anew within an epoch; give a CombinedLoader with mode='min_size'"
    for loader in loaders:
        if isinstance(loader, _lightning.epochs.Stateful):
            return f"the {type(loader).__name__} has a state_dict, which would say what was read ahead; leave it out"
    data = getattr(trainer, "datamodule", None)
    if data is not None and any(is_overridden(name, data) for name in ("state_dict", "on_save_checkpoint")):
        return (
            f"{type(data).__name__} saves a state, which may be that of what was read ahead; keep the data set's own "
            "state out of state_dict and on_save_checkpoint, and these out of the data module"
        )
    return ""


def draws_once(trainer: Trainer) -> bool:
    """Whether the main process draws nothing for batches behind the first one of an epoch."""
    training = _lightning.epochs.training_pass(trainer)
    return training is not None and all(map(_draws_once, training.loaders))


def _draws_once(loader: Any) -> bool:
    if type(loader) is not DataLoader or loader.num_workers == 0:
        return False
    if isinstance(loader.dataset, IterableDataset):
        return True
    noting = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    batches = getattr(noting, "batches", noting)  # a strategy may note what is read
    sampler = batches.sampler if type(batches) is BatchSampler else batches
    return type(sampler) in _DRAWING_ONCE


class Probe(Iterator[Any]):
    """An iterator that is looked at while the main thread reads it: who draws from default generators?

    Args:
        inner: The iterator.
        device: This rank's device.
        watch: Looks at what is drawn between two batches.
    """

    def __init__(self, inner: Any, device: torch.device, watch: HostDraws) -> None:
        self.inner, self._device, self._watch = inner, device, watch
        self.num_read = 0
        self.reason = ""
        """The reason why it cannot be read ahead; empty so far."""

    def __next__(self) -> Any:
        if self._watch.look():
            self.reason = self.reason or TRAINING_DRAWS
        before = RandomState.take(self._device)
        item = next(self.inner)
        if has_drawn(before, RandomState.take(self._device)):
            self.reason = DATA_DRAWS
        self._watch.look()
        self.num_read += 1
        return item

    def __len__(self) -> int:
        return len(self.inner)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.inner, memo)

    def settle(self) -> int:
        """Return 0: it reads nothing ahead."""
        return 0

    def reset(self) -> None:
        """Reset the iterator."""
        self.inner.reset()

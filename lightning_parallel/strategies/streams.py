"""Random numbers of a fit: separate over ranks that read different samples, saved, and continued on resume."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader

from lightning_parallel import _lightning
from lightning_parallel.ranks.random_streams import RandomState, data_rank_stream

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

_KEY = "lightning_parallel"


class RandomStreams:
    """Two streams for each rank: one that all ranks share, and one of its own, from which training steps draw.

    Hooks, loaders and `configure_model` have to draw equal numbers on all ranks; dropout in a step must not.
    """

    def __init__(self) -> None:
        self._loaded: Mapping[str, Any] | None = None
        self._own: RandomState | None = None
        self._has_resumed = False
        self._rest: Mapping[str, Any] | None = None
        self._iterator: object = None

    def begin(self, trainer: Trainer, data_rank: int, device: torch.device, *, reads_on: bool = False) -> None:
        """Continue the streams of the checkpoint, or begin new ones.

        With another number of ranks, only the shared stream continues.

        Args:
            trainer: The trainer, at the start of training.
            data_rank: This rank among those that read different samples.
            device: This rank's device.
            reads_on: Whether the loaders go on where the checkpoint was saved: then they draw what they would have.
        """
        loaded, self._loaded = self._loaded, None
        states = loaded.get("states", []) if loaded else []
        if states:
            shared, own = states[dist.get_rank() if len(states) == dist.get_world_size() else 0]
            RandomState.from_plain(shared).restore(device)
            self._has_resumed = not reads_on
            self._rest = shared if loaded and loaded["is_in_epoch"] else None
            if self._rest is None and _can_begin_again(trainer):
                # They have drawn already, and the first batch may be there: as the epoch would have begun, from here.
                _lightning.epochs.begin_pass(trainer)
                self._has_resumed = False
            self._iterator = _lightning.training_iterator(trainer)
        if len(states) == dist.get_world_size():
            self._own = RandomState.from_plain(own)
        else:
            self._own = data_rank_stream(data_rank, progress=trainer.global_step, device=device)

    @contextmanager
    def step(self, device: torch.device) -> Iterator[None]:
        """Let this rank draw from its own stream here."""
        if self._own is None:
            yield
            return
        shared = RandomState.take(device)
        self._own.restore(device)
        try:
            yield
        finally:
            self._own = RandomState.take(device)
            shared.restore(device)

    @property
    def of_steps(self) -> RandomState | None:
        """The state from which the next step draws; ``None`` outside of training."""
        return self._own

    def end(self) -> None:
        """End this rank's own stream: training has ended."""
        self._own = None

    def continue_epoch(self, trainer: Trainer, device: torch.device) -> None:
        """Call it before a batch: the first one after a resume draws as the one after the checkpoint did.

        Args:
            trainer: The trainer.
            device: This rank's device.
        """
        if not self._has_resumed:
            return
        if self._rest is not None:
            RandomState.from_plain(self._rest).restore(device)
        elif self._iterator is _lightning.training_iterator(trainer):
            _draw_seeds_of_loaders(trainer)  # a new epoch would have made its iterator by now; this one was made before
        self._has_resumed, self._rest, self._iterator = False, None, None

    def add_to(self, checkpoint: dict[str, Any], trainer: Trainer, device: torch.device) -> None:
        """Add the state of all ranks to a checkpoint of a fit. A collective.

        Args:
            checkpoint: Changed in place, on rank 0.
            trainer: The trainer.
            device: This rank's device.
        """
        if not dist.is_initialized() or "loops" not in checkpoint or self._own is None:
            return
        is_first = dist.get_rank() == 0
        states: list[Any] | None = [None] * dist.get_world_size() if is_first else None
        own = RandomState.take(device).to_plain(), self._own.to_plain()
        # As arrays: `torch.save` pickles tensors, and a test may have put something in its place that writes nothing.
        dist.gather_object(tree_map_only(Tensor, Tensor.numpy, own), states, dst=0)
        is_in_epoch = not trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        plain = tree_map_only(np.ndarray, torch.from_numpy, states or [])
        checkpoint[_KEY] = {"states": plain, "is_in_epoch": is_in_epoch}

    def take_from(self, checkpoint: Mapping[str, Any]) -> None:
        """Keep the states of a checkpoint until training begins."""
        self._loaded = checkpoint.get(_KEY)


def _can_begin_again(trainer: Trainer) -> bool:
    """Whether all training loaders can be read from their beginning again.

    An iterator could not. One with a state of its own, such as torchdata's `StatefulDataLoader`, has gone on from it.
    """
    loaders = _lightning.training_loaders(trainer)
    return loaders is not None and all(
        isinstance(loader, DataLoader) and not isinstance(loader, _lightning.epochs.Stateful)
        for loader in loaders.flattened
    )


def _draw_seeds_of_loaders(trainer: Trainer) -> None:
    """Draw what making iterators draws: `torch.utils.data.DataLoader` takes one number for the seeds of its workers."""
    loaders = _lightning.training_loaders(trainer)
    for loader in loaders.flattened if loaders is not None else ():
        if isinstance(loader, DataLoader) and loader.generator is None:
            torch.empty((), dtype=torch.int64).random_()

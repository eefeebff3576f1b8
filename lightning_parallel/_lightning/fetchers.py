"""Loops and their fetchers, which read batches: private names of Lightning."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from lightning.pytorch.trainer.states import TrainerFn

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

END = 2**31 - 1
"""The number of a loader behind the last one."""


def set_loaders_ready(trainer: Trainer, called: Callable[[], None] | None) -> None:
    """Let `trainer` call `called` whenever it has new training loaders, before anything reads their number of batches.

    `_FitLoop.setup_data`, since 2.0, and `_data_fetcher`, since 1.5; wait for a hook behind the loaders.

    Args:
        trainer: The trainer.
        called: Without arguments; ``None`` undoes it.
    """
    vars(trainer.fit_loop).pop("setup_data", None)
    if called is None:
        return
    set_up = trainer.fit_loop.setup_data

    def setup_data() -> None:
        before = trainer.fit_loop._data_fetcher
        set_up()
        if trainer.fit_loop._data_fetcher is not None and trainer.fit_loop._data_fetcher is not before:
            called()

    vars(trainer.fit_loop)["setup_data"] = setup_data


def training_length(trainer: Trainer) -> int | None:
    """The number of training batches of an epoch, as the loaders and limits say; ``None`` where nobody knows.

    `_FitLoop._combined_loader`, since 2.0; the public `num_training_batches` may have been changed already.
    """
    return sized_len(trainer.fit_loop._combined_loader)


def set_training_length(trainer: Trainer, length: int | None) -> None:
    """Let `trainer` believe that an epoch of training has `length` batches, and validate accordingly.

    `_FitLoop.max_batches` (public), and `Trainer._val_check_time_interval`, since 2.6, where batches do not count.
    """
    trainer.fit_loop.max_batches = math.inf if length is None else length
    if getattr(trainer, "_val_check_time_interval", None) is None and isinstance(trainer.val_check_interval, float):
        trainer.val_check_batch = math.inf if length is None else max(1, int(length * trainer.val_check_interval))


def read_training_through(trainer: Trainer, loader: Any, length: int | None) -> bool:
    """Let the fetcher of training batches read from `loader` from now on, and go on with what it has read.

    Args:
        trainer: The trainer, at the beginning of an epoch.
        loader: What iterates over the trainer's loaders; its length is `length`.
        length: Of an epoch; ``None`` where nobody knows, and a batch is read ahead.

    Returns:
        Whether there may be a first batch: where one is read ahead, whether there was one.

    `_DataFetcher`, since 1.5; waits for loaders that can be replaced.
    """
    fetcher = trainer.fit_loop._data_fetcher
    assert fetcher is not None
    fetcher.setup(loader)
    fetcher.iterator, fetcher.length = loader, length
    if length is not None:
        fetcher.done = length == 0
    return not fetcher.done


def leave_epoch(trainer: Trainer) -> None:
    """Let the fetcher of training batches have none left. `_DataFetcher`, as above."""
    fetcher: Any = trainer.fit_loop._data_fetcher
    fetcher.done = True
    if hasattr(fetcher, "batches"):
        fetcher.batches.clear()


def evaluation_loop(trainer: Trainer) -> Any:
    """The loop that evaluates or predicts now, which has set up its fetcher."""
    loops: dict[Any, Any] = {
        TrainerFn.FITTING: trainer.fit_loop.epoch_loop.val_loop,
        TrainerFn.VALIDATING: trainer.validate_loop,
        TrainerFn.TESTING: trainer.test_loop,
        TrainerFn.PREDICTING: trainer.predict_loop,
    }
    return loops[trainer.state.fn]


def reads_together(loop: Any) -> bool:
    """Whether an evaluation takes a batch of each of its loaders at a time; not before it has them.

    `_EvaluationLoop._combined_loader` and its `_mode`, since 2.0; wait for public properties.
    """
    loaders = loop._combined_loader
    return loaders is not None and loaders._mode != "sequential"


class BatchesAhead:
    """The batches of an evaluation, of which one is read ahead of what the loop has been given.

    `_EvaluationLoop._data_fetcher`, since 1.5; waits for a public way to look ahead.

    Args:
        loop: The loop, which has set up its fetcher and read nothing but what that reads ahead.
    """

    def __init__(self, loop: Any) -> None:
        self._fetcher = loop._data_fetcher
        self._iterator, self._read = self._fetcher.iterator, list[Any]()
        self._fetcher.iterator = self

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._read.pop() if self._read else next(self._iterator)

    def next_part(self) -> int:
        """The index of the loader from which the next batch comes; `END` if there is none."""
        if ready := getattr(self._fetcher, "batches", None):
            return int(ready[0][2])
        if self._fetcher.done:
            return END
        if not self._read:
            with contextlib.suppress(StopIteration):
                self._read.append(next(self._iterator))
        return int(self._read[0][2]) if self._read else END


def read_evaluation_through(loop: Any, wrap: Callable[[Iterator[Any]], Iterator[Any]]) -> None:
    """Let the fetcher of `loop` read from an iterator around its own, such as one that ends earlier."""
    loop._data_fetcher.iterator = wrap(loop._data_fetcher.iterator)


def evaluation_counts(loop: Any) -> list[int | float]:
    """The number of batches of each loader that `loop` reads one after the other, infinity where nobody knows.

    `_combined_loader` and its `_mode`, since 2.0; wait for public properties.
    """
    if loop._combined_loader._mode == "sequential":
        return list(loop.max_batches)
    length = sized_len(loop._combined_loader)
    return [math.inf if length is None else length]


def loaders_of(loop: Any) -> list[Any]:
    """The loaders of a loop. `_combined_loader`, since 2.0; waits for a public property of all loops."""
    return list(loop._combined_loader.flattened)


def gives_iterator(loop: Any) -> bool:
    """Whether steps are given an iterator of batches. `_DataLoaderIterDataFetcher`, since 1.5; waits for a property."""
    return isinstance(loop._data_fetcher, _DataLoaderIterDataFetcher)


def own_batch_sampler(sampler: object) -> object:
    """The batch sampler that a loader had before Lightning took notes of what it gives, in prediction.

    `_IndexBatchSamplerWrapper`, since 1.5; waits for a public name.
    """
    return sampler._batch_sampler if isinstance(sampler, _IndexBatchSamplerWrapper) else sampler


def set_end_of_batch(loop: Any, called: Callable[[], None] | None) -> None:
    """Let an evaluation loop call `called` behind each batch and its hooks, and behind the last one.

    `_Loop.on_iteration_done`, since 2.5; waits for a hook there.

    Args:
        loop: The loop.
        called: Without arguments; ``None`` undoes it.
    """
    vars(loop).pop("on_iteration_done", None)
    if called is None:
        return
    done = loop.on_iteration_done

    def on_iteration_done() -> None:
        done()
        called()

    vars(loop)["on_iteration_done"] = on_iteration_done

"""The position of a fit in its data: saved for all ranks together, and taken up on any number of them."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_parallel import _lightning
from lightning_parallel.strategies.positioned_batches import PositionedBatches, Start, batches_of, is_positionable
from lightning_parallel.strategies.read_order import NoOrderError
from lightning_parallel.strategies.restored_loaders import begin_epoch, deal_states, state_problem, states_of_rank
from lightning_parallel.strategies.saved_position import num_in_flight, saved_position

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

KEY = "lightning_parallel"
"""The key of what the package adds to a checkpoint."""
_POSITION = "position"
_RETIRED = "You're resuming from a checkpoint that ended before the epoch ended"
"""Lightning's warning; it knows loaders with a `state_dict` only."""


class DataRanks(Protocol):
    """A strategy, as far as the position reads it."""

    @property
    def data_ranks(self) -> tuple[int, int]:
        """Number of ranks that read different samples, and which of them this one is."""

    @property
    def world_size(self) -> int:
        """The number of ranks."""

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks say so. A collective."""


class DataPosition:
    """Knows how much of an epoch has been read, and where to begin after a resume.

    Args:
        ranks: The strategy.
    """

    def __init__(self, ranks: DataRanks) -> None:
        self._ranks = ranks
        self._trainer: Trainer | None = None
        self._loaded: Mapping[str, Any] | None = None
        self._goes_on: bool | None = None
        self._starts: dict[int, Start] | None = None
        self._left: list[int | None] = []
        self._problems: list[str] = []
        self._dealt: set[int] = set()
        self._quiet = contextlib.ExitStack()
        self.is_exact = False
        """Whether the fit has gone on in the middle of an epoch, with all that was not read before."""

    # Saving -----------------------------------------------------------------------------------------------------

    def add_to(self, checkpoint: dict[str, Any], trainer: Trainer) -> None:
        """Add the position to a checkpoint of a fit. A collective.

        Args:
            checkpoint: Changed in place, on rank 0.
            trainer: The trainer.
        """
        if "loops" not in checkpoint or _lightning.epochs.training_pass(trainer) is None:
            return
        states = list(checkpoint["loops"]["fit_loop"]["state_dict"].get("combined_loader", []))
        entry: Mapping[str, Any] = saved_position(trainer, states, self._ranks.data_ranks[1])
        if self._loaded is not None and self._goes_on is None:  # nothing has been read yet
            entry = self._loaded
        checkpoint.setdefault(KEY, {})[_POSITION] = entry

    # Resuming ---------------------------------------------------------------------------------------------------

    def take_from(self, checkpoint: dict[str, Any]) -> None:
        """Keep the position of a checkpoint until training begins, and choose this rank's states of loaders."""
        self.end()
        self._loaded = (checkpoint.get(KEY) or {}).get(_POSITION)
        if self._loaded is None:
            return
        if (states := states_of_rank(self._loaded, self._ranks.data_ranks)) is not None:
            checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"] = states

    def read_through(self, loader: Any, trainer: Trainer, *, is_dealt: bool) -> Any:
        """A loader of training as one that can begin in the middle of an epoch; another one comes back as it is.

        Args:
            loader: The loader.
            trainer: The trainer.
            is_dealt: Whether the package has made its sampler.
        """
        self._trainer = trainer
        is_training = trainer.state.stage == RunningStage.TRAINING
        if is_training and is_dealt and isinstance(loader, _lightning.epochs.Stateful):
            deal_states(loader, self._loaded)
        if not is_training or not is_positionable(loader) or isinstance(loader, _lightning.epochs.Stateful):
            return loader
        found = PositionedBatches.given_to(loader, self._start)
        if is_dealt:
            self._dealt.add(id(batches_of(found)))
        return found

    def _start(self, batches: PositionedBatches) -> Start:
        assert self._trainer is not None
        epoch, _ = _lightning.epochs.place_of_epoch(self._trainer)
        if (loaded := self._loaded) is None:
            return Start(epoch)
        if self._goes_on is None:  # the trainer may not have its counters yet
            epoch = loaded["epoch"]
        self._keep_seed(batches)
        if loaded["is_in_epoch"] and self._goes_on is not False and epoch == loaded["epoch"]:
            return self._resolved().pop(id(batches), Start(epoch))
        return Start(epoch)

    def _keep_seed(self, batches: PositionedBatches) -> None:
        """Let the sampler that the package has made draw epochs as in the run that was saved."""
        assert self._loaded is not None
        found = [batches_of(loader) for loader in self._loaders]
        if id(batches) in self._dealt and batches in found and len(found) == len(self._loaded["loaders"]):
            seed = self._loaded["loaders"][found.index(batches)].get("seed")
            if seed is not None and hasattr(batches.source, "seed"):
                batches.source.seed = seed

    @property
    def _loaders(self) -> Sequence[Any]:
        assert self._trainer is not None
        training = _lightning.epochs.training_pass(self._trainer)
        return () if training is None else training.loaders

    def _resolved(self) -> dict[int, Start]:
        """Starts of the loaders, as far as it can be told. A collective."""
        if self._starts is not None:
            return self._starts
        assert self._loaded is not None
        self._starts, self._left, self._problems = {}, [], []
        entries = self._loaded["loaders"]
        for index, loader in enumerate(self._loaders):
            entry = entries[index] if len(entries) == len(self._loaders) else _NO_ENTRY
            problem = self._place(loader, entry)
            if not self._ranks.reduce_boolean_decision(not problem):
                self._starts.pop(id(batches_of(loader)), None)
                self._left[index] = None
                self._problems.append(f"{_name(loader)}, {problem or 'as another rank says'}")
        return self._starts

    def _place(self, loader: Any, entry: Mapping[str, Any]) -> str:
        """Note where `loader` begins; returns the reason why that is not known."""
        assert self._loaded is not None
        assert self._starts is not None
        self._left.append(None)
        batches = batches_of(loader)
        if entry["kind"] == "state":
            return state_problem(loader, entry, self._ranks.data_ranks[0])
        if entry["kind"] != "order":
            return str(entry["reason"])
        if batches is None:
            return "which read by index when it was saved"
        try:
            order = batches.order(entry, self._loaded["epoch"], self._ranks.data_ranks)
        except NoOrderError as error:
            return str(error)
        self._left[-1] = order.num_batches(batches.source, **batches.of_batch)
        rest = order.batches(batches.source, **batches.of_batch)
        self._starts[id(batches)] = Start(self._loaded["epoch"], rest, entry)
        return ""

    def begin(self, trainer: Trainer) -> None:
        """Take up the position of the checkpoint, once the trainer knows with which epoch it goes on. A collective."""
        self.is_exact = False
        _lightning.epochs.leave_ended_epoch(trainer)
        if (loaded := self._loaded) is None or self._trainer is None:
            return
        epoch, _ = _lightning.epochs.place_of_epoch(trainer)
        is_same = trainer.fit_loop.restarting and epoch == loaded["epoch"]
        self._goes_on = loaded["is_in_epoch"] and is_same
        if not self._goes_on and states_of_rank(loaded, self._ranks.data_ranks):
            begin_epoch(trainer)
        begins_again = bool(self._goes_on) and _lightning.epochs.load_waiting_states(trainer)
        if self._goes_on:
            self._resolved()
        for each in filter(None, map(batches_of, self._loaders)):
            started = each.started
            if started is not None and (started.epoch != epoch or (started.rest is not None and not self._goes_on)):
                begins_again = True
        if begins_again:
            self._starts = None
        if self._goes_on:
            self._resolved()
            self._count(trainer)
            self._tell(trainer, epoch)
        if begins_again:
            _lightning.epochs.begin_pass(trainer)

    def _count(self, trainer: Trainer) -> None:
        """Let the last batch of the epoch have the index that it has in any epoch with this number of ranks."""
        assert self._loaded is not None
        current = trainer.fit_loop.epoch_loop.batch_progress.current
        number = current.ready - num_in_flight(current)
        shift = -self._loaded["rewound"]
        lengths = [None if batches_of(loader) is None else len(loader) for loader in self._loaders]
        if None not in lengths and None not in self._left:
            training = _lightning.epochs.training_pass(trainer)
            assert training is not None
            choose = min if training.mode == "min_size" else max
            index = choose(range(len(lengths)), key=lambda each: lengths[each] or 0)
            wanted = (lengths[index] or 0) - (self._left[index] or 0)
            shift = min(wanted, int(trainer.num_training_batches)) - number
            if wanted >= trainer.num_training_batches and self._starts:
                for start in self._starts.values():
                    start.rest = iter(())
        if shift:
            _lightning.epochs.set_back_batches(trainer, shift)

    def _tell(self, trainer: Trainer, epoch: int) -> None:
        self.is_exact = not self._problems
        self._quiet.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message=_RETIRED)
        for problem in self._problems:
            rank_zero_warn(_BEGINS_ANEW.format(epoch, problem))

    def release(self) -> None:
        """Call it when the first batch is there: what was loaded is used up."""
        self._loaded = self._starts = self._goes_on = None
        self._quiet.close()

    def end(self) -> None:
        """Forget everything: the fit has ended."""
        self.release()
        self._trainer = None
        self._dealt.clear()


_NO_ENTRY: Mapping[str, Any] = {"kind": "none", "reason": "in place of another number of loaders"}
_BEGINS_ANEW = (
    "training goes on in the middle of epoch {}, but a training loader begins anew: {}. Samples that were read before "
    "are read again, and the last ones of the epoch may never be. Give the loader indices in an order that can be "
    "drawn again (a data set with __getitem__ and __len__) or state_dict and load_state_dict (torchdata's "
    "StatefulDataLoader) on the same number of data ranks, or resume from a checkpoint of the end of an epoch"
)


def _name(loader: Any) -> str:
    data = getattr(loader, "dataset", None)
    return f"{type(loader).__name__} of {type(data).__name__}" if data is not None else type(loader).__name__

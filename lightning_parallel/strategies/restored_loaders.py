"""Training loaders with states of their own, such as torchdata's `StatefulDataLoader`, where a fit is resumed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.utilities.data import has_iterable_dataset
from torch.utils.data import DataLoader

from lightning_parallel import _lightning
from lightning_parallel.ranks.random_streams import unchanged_generators

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


_SEED = "_lightning_parallel_seed"
"""Mark of a sampler whose order the package has chosen. That of the user's own is the user's."""


def state_entry(loader: Any) -> dict[str, Any]:
    """The entry of a loader in a checkpoint, without its state: the seed of the sampler that the package has made."""
    sampler = _sampler_of(loader)
    return {"kind": "state", "seed": int(sampler.seed)} if hasattr(sampler, _SEED) else {"kind": "state"}


def states_of_rank(position: Mapping[str, Any], data_ranks: tuple[int, int]) -> list[Any] | None:
    """The states of this rank, in the order of the loaders that have some; ``None`` where none has.

    Args:
        position: As `saved_position` has made it.
        data_ranks: Number of ranks that read different samples now, and which this one is. There are no states for
            another number than that of the run that was saved.
    """
    stateful = [entry for entry in position["loaders"] if entry["kind"] == "state"]
    count, rank = data_ranks
    if not stateful:
        return None
    return [each["states"][rank] for each in stateful] if all(len(e["states"]) == count for e in stateful) else []


def deal_states(loader: Any, position: Mapping[str, Any] | None) -> None:
    """Let the sampler that the package has made draw the epoch that was saved, as it was drawn.

    A loader with a state counts what it has read of an order; another order would be read from there on. Workers begin
    to read before Lightning tells samplers the epoch.

    Args:
        loader: The loader, before it is given its state.
        position: As `saved_position` has made it, whose seeds are that of the run; ``None`` without a checkpoint.
    """
    if (sampler := _sampler_of(loader)) is None:
        return
    setattr(sampler, _SEED, True)
    if position is None:
        return
    sampler.set_epoch(position["epoch"])
    if seeds := [entry["seed"] for entry in position["loaders"] if entry["kind"] == "state" and "seed" in entry]:
        sampler.seed = seeds[0]


def state_problem(loader: Any, entry: Mapping[str, Any], num_ranks: int) -> str:
    """The reason why a loader does not go on from its state, in words; empty if it does.

    Args:
        loader: The loader.
        entry: As `saved_position` has made it.
        num_ranks: Ranks that read different samples now.
    """
    if (count := len(entry["states"])) != num_ranks:
        return f"whose states are those of {count} data ranks, where {num_ranks} read now"
    if not isinstance(loader, _lightning.epochs.Stateful):
        return "which has no load_state_dict any more"
    if "seed" not in entry and hasattr(sampler := _sampler_of(loader), _SEED) and getattr(sampler, "shuffle", False):
        return "whose checkpoint does not say in which order its samples were dealt out"
    return ""


def _sampler_of(loader: Any) -> Any:
    """The sampler that draws an order by a seed, which may be inside of one of batches; ``None`` without."""
    batches = getattr(loader, "batch_sampler", None)
    samplers = (getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None))
    known = (each for each in samplers if isinstance(getattr(each, "seed", None), int))
    return next((each for each in known if hasattr(each, "set_epoch")), None)


def begin_epoch(trainer: Trainer) -> None:
    """Begin an epoch behind the one at whose end torchdata's loaders were saved.

    One that had given its last batch, but had not been asked for another one, takes the state for one of a pass that
    goes on, and would give nothing in the whole epoch; so would one of which a limited epoch has read a part go on with
    the rest. Begun again, it gives a new pass. A data set without indices may keep its position by itself, and other
    loaders may count passes: both are left as they are.

    Args:
        trainer: The trainer, whose loaders have their states, and iterators.
    """
    training = _lightning.epochs.training_pass(trainer)
    restored = [] if training is None else [e for e in training.loaders if isinstance(e, _lightning.epochs.Stateful)]
    if not restored or not all(map(_begins_passes, restored)):
        return
    epoch, _ = _lightning.epochs.place_of_epoch(trainer)
    for loader in restored:
        if (sampler := _sampler_of(loader)) is not None:
            sampler.set_epoch(epoch)
    with unchanged_generators(torch.device("cpu")):
        _lightning.epochs.begin_pass(trainer)


def _begins_passes(loader: Any) -> bool:
    """Whether it is torchdata's, over a data set with indices: it has no place but that of its iterator."""
    is_theirs = any(cls.__module__.startswith("torchdata.") for cls in type(loader).__mro__)
    return is_theirs and isinstance(loader, DataLoader) and not has_iterable_dataset(loader)

"""Train a module under a strategy and under plain Lightning in one process, and compare."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import Strategy
from torch import Tensor

from lightning_parallel import build_strategy, full_state_dict
from lightning_parallel.callbacks import GradientNorm
from lightning_parallel.presets import PRESETS
from tests.data import STEPS, batches
from tests.models.tables import MODULES
from tests.names import num_readers

TOLERANCE = 1e-5
"""fp32 sums in another order: five steps of these models differ by some 1e-7 where nothing is wrong."""

BF16 = 2e-2
"""On the loss: bf16 has 8 bits of mantissa, and a half batch rounds elsewhere than a whole one."""

PARITY = "parity"
"""What tests record as a property, for the table at the end: ((module, name), the largest difference)."""


@dataclass
class Outcome:
    """What a run is judged by. Only rank 0 has weights; norms of gradients are there if `GradientNorm` logged them."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    initial: dict[str, Tensor] = field(default_factory=dict)
    final: dict[str, Tensor] = field(default_factory=dict)


class Recorder(Callback):
    """Notes the loss of each global batch and the norm of its gradients, and the weights before the first step."""

    def __init__(self) -> None:
        self.outcome = Outcome()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.outcome.initial = full_state_dict(trainer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = outputs["loss"].detach().clone()
        if trainer.world_size > 1:
            dist.all_reduce(loss)
            loss /= trainer.world_size
        self.outcome.losses.append(loss.item())
        if "grad_norm" in trainer.callback_metrics:
            self.outcome.norms.append(float(trainer.callback_metrics["grad_norm"]))


def make_trainer(strategy: Any, num_ranks: int, **kwargs: Any) -> L.Trainer:
    """A quiet trainer on the CPU."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": num_ranks,
        "strategy": strategy,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    return L.Trainer(**{**defaults, **kwargs})


def trainer_for(strategy: str, num_ranks: int, **kwargs: Any) -> L.Trainer:
    """A quiet trainer with the strategy of that name and its options, or Lightning's own with ``"auto"``.

    The test that trains it compares it, so its first step is compared only if `strategy` says so.
    """
    return make_trainer("auto" if strategy == "auto" else unchecked_strategy(strategy), num_ranks, **kwargs)


def checked(strategy: str) -> str:
    """The same strategy, with a comparison of its first step, which may not differ."""
    return _with_option(strategy, "check=first_step")


def unchecked_strategy(strategy: str) -> Strategy:
    """The strategy of that name and its options, without a comparison of its first step unless they say so."""
    if strategy in PRESETS:  # without options to read, which takes longer than the rest
        preset = PRESETS[strategy]
        return preset.build(**preset.arguments, check="off")
    return build_strategy(strategy if "check=" in strategy else _with_option(strategy, "check=off"))


def _with_option(strategy: str, option: str) -> str:
    name, _, options = strategy.partition(":")
    return f"{name}:{options},{option}" if options else f"{name}:{option}"


def train_module(
    make: Callable[[], L.LightningModule],
    loader: Any,
    strategy: str,
    num_ranks: int,
    *,
    norms: bool = False,
    watching: Sequence[Callback] = (),
    **kwargs: Any,
) -> Outcome:
    """One epoch of any module, clipped; on every rank of a pool, or in one process with ``strategy="auto"``."""
    L.seed_everything(3, verbose=False)
    module, recorder = make(), Recorder()
    if module.automatic_optimization:
        kwargs.setdefault("gradient_clip_val", 0.5)
    callbacks = [*watching, *([GradientNorm()] if norms else []), recorder]
    trainer = trainer_for(strategy, num_ranks, callbacks=callbacks, **kwargs)
    trainer.fit(module, loader)
    recorder.outcome.final = full_state_dict(trainer)
    return recorder.outcome


def train(
    case: str,
    optimizer: str,
    strategy: str,
    num_ranks: int,
    readers: int | None = None,
    *,
    steps: int = STEPS,
    **kwargs: Any,
) -> Outcome:
    """Some steps of a module of `tests.models`.

    Args:
        case: The name of the module.
        optimizer: ``"sgd"`` or ``"adamw"``.
        strategy: A name, with options or without; ``"auto"`` is plain Lightning.
        num_ranks: How many ranks run this.
        readers: How many of them read different samples; by itself that of the name.
        steps: The number of steps.
        kwargs: Of `train_module`, and of the Trainer.
    """
    readers = num_readers(strategy.partition(":")[0], num_ranks) if readers is None else readers
    make = functools.partial(MODULES[case], optimizer)
    return train_module(make, batches(case, readers, steps), strategy, num_ranks, **kwargs)


@functools.cache
def once(job: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``job(*args, **kwargs)`` in this process, once a session. A job seeds by itself; nobody may change its result."""
    return job(*args, **kwargs)


def reference(case: str, optimizer: str = "adamw", **kwargs: Any) -> Outcome:
    """Plain Lightning in one process, once a session."""
    found: Outcome = once(train, case, optimizer, "auto", 1, **kwargs)
    assert is_moving(found)
    return found


def largest(values: Iterable[Any]) -> float:
    """The largest of some numbers, or NaN if any of them is: in Python's `max`, a NaN that is not the first loses."""
    return float(torch.tensor([float(value) for value in values], dtype=torch.float64).max())


def difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest difference of any element; keys, shapes and dtypes have to be the same."""
    assert list(ours) == list(theirs)
    for name in theirs:
        assert ours[name].shape == theirs[name].shape, name
        assert ours[name].dtype == theirs[name].dtype, name
    return largest((ours[name].double() - theirs[name].double()).abs().max() for name in theirs)


def worst(ours: Outcome, reference: Outcome) -> float:
    """The largest difference of losses, initial and final weights."""
    losses = largest(abs(a - b) for a, b in zip(ours.losses, reference.losses, strict=True))
    return largest([losses, difference(ours.initial, reference.initial), difference(ours.final, reference.final)])


def is_moving(outcome: Outcome) -> bool:
    """Whether training changed the weights at all: two runs that do nothing are equal too."""
    return any(not torch.equal(outcome.initial[name], outcome.final[name]) for name in outcome.final)


def assert_same_training(ours: Outcome, theirs: Outcome) -> None:
    """Losses, weights and norms of each step."""
    assert worst(ours, theirs) < TOLERANCE
    assert len(ours.norms) == len(ours.losses) == len(theirs.losses) > 1
    assert ours.norms == pytest.approx(theirs.norms, abs=TOLERANCE)

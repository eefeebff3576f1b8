"""Train a case under a strategy and under plain Lightning in one process, and compare."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor

import lightning_parallel
from tests.models.cases import CASES, REFUSED_CASES, loader_of

STEPS = 5
GLOBAL_BATCH = 8
TOLERANCE = 1e-5
"""fp32 sums in another order: five steps of these models differ by some 1e-7 where nothing is wrong."""

PARITY = "parity"
"""What tests record as a property, for the table at the end: ((module, name), the largest difference)."""


@dataclass
class Outcome:
    """What a run is judged by. Only rank 0 has weights."""

    losses: list[float] = field(default_factory=list)
    initial: dict[str, Tensor] = field(default_factory=dict)
    final: dict[str, Tensor] = field(default_factory=dict)


class Recorder(Callback):
    """Notes the loss of each global batch, and the weights before the first step."""

    def __init__(self) -> None:
        self.outcome = Outcome()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.outcome.initial = lightning_parallel.full_state_dict(trainer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = outputs["loss"].detach().clone()
        if trainer.world_size > 1:
            dist.all_reduce(loss)
            loss /= trainer.world_size
        self.outcome.losses.append(loss.item())


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


def train(case: str, optimizer: str, strategy: str, num_ranks: int, **kwargs: Any) -> Outcome:
    """Five steps; on every rank of a pool, or in one process with ``strategy="auto"`` and one rank."""
    L.seed_everything(3, verbose=False)
    module = (CASES | REFUSED_CASES)[case](optimizer)
    recorder = Recorder()
    if module.automatic_optimization:
        kwargs.setdefault("gradient_clip_val", 0.5)
    built = strategy if strategy == "auto" else lightning_parallel.build_strategy(strategy)
    trainer = make_trainer(built, num_ranks, callbacks=[recorder], **kwargs)
    readers = num_readers(strategy.partition(":")[0], num_ranks)
    trainer.fit(module, loader_of(case, steps=STEPS, global_batch=GLOBAL_BATCH, num_ranks=readers))
    recorder.outcome.final = lightning_parallel.full_state_dict(trainer)
    return recorder.outcome


def num_readers(name: str, num_ranks: int) -> int:
    """How many ranks read other samples."""
    if name in ("dp_custom", "cp_custom", "tp_custom", "pp_custom"):
        return 1
    return num_ranks // 2 if name == "fsdp_tp_custom" else num_ranks


def difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest difference of any element; keys, shapes and dtypes have to be the same."""
    assert list(ours) == list(theirs)
    for name in theirs:
        assert ours[name].shape == theirs[name].shape, name
        assert ours[name].dtype == theirs[name].dtype, name
    largest = torch.stack([(ours[name].double() - theirs[name].double()).abs().max() for name in theirs])
    return largest.max().item()  # not Python's max, in which NaN may lose


def worst(ours: Outcome, reference: Outcome) -> float:
    """The largest difference of losses, initial and final weights."""
    losses = float(torch.tensor([a - b for a, b in zip(ours.losses, reference.losses, strict=True)]).abs().max())
    weights = difference(ours.initial, reference.initial), difference(ours.final, reference.final)
    return float(torch.tensor([losses, *weights], dtype=torch.float64).max())


def is_moving(outcome: Outcome) -> bool:
    """Whether training changed the weights at all: two runs that do nothing are equal too."""
    return any(not torch.equal(outcome.initial[name], outcome.final[name]) for name in outcome.final)

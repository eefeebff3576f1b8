"""Ranks whose Trainers would meet in other places than others, or compute something else, are refused at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch.callbacks import (
    Callback,
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelSummary,
    Timer,
)
from lightning.pytorch.loggers import CSVLogger

from lightning_parallel.callbacks import GradientNorm
from tests.data import batches
from tests.models.cases import ByteGPT
from tests.parity import trainer_for
from tests.rank_pool import RankError

SETTINGS: dict[str, tuple[Any, Any, str]] = {
    "accumulate_grad_batches": (1, 2, "accumulate_grad_batches is 1 on rank 0, 2 on rank 1"),
    "precision": ("32-true", "bf16-mixed", "precision is '32-true' on rank 0, 'bf16-mixed' on rank 1"),
    "gradient_clip_val": (0.5, None, "gradient_clip_val is 0.5 on rank 0, None on rank 1"),
    "max_epochs": (2, 3, "max_epochs is 2 on rank 0, 3 on rank 1"),
    "limit_val_batches": (1.0, 0, "limit_val_batches is 1.0 on rank 0, 0 on rank 1"),
    "num_sanity_val_steps": (1, 0, "num_sanity_val_steps is 1 on rank 0, 0 on rank 1"),
}
"""Of the first rank, of the second one, and what is said."""
MEETING = "ModelCheckpoint", "EarlyStopping", "Timer", "GradientNorm"


def other_settings(strategy: str, name: str) -> None:
    value = SETTINGS[name][dist.get_rank()]
    trainer_for(strategy, 2, **{name: value}).fit(ByteGPT(), batches("byte_gpt", 2, 2), batches("byte_gpt", 2, 2))


@pytest.mark.parametrize("strategy", ["ddp_custom", "fsdp_custom", "pp_custom"])
@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_ranks_are_compared(ranks: Any, strategy: str, name: str) -> None:
    with pytest.raises(RankError, match=f"ranks run with other settings than others: {SETTINGS[name][2]}") as caught:
        ranks(2).run(other_settings, strategy, name)
    assert "refused; rank 0 says why" in str(caught.value)


def _callback(name: str, folder: str) -> Callback:
    if name == "ModelCheckpoint":
        return ModelCheckpoint(folder)
    return {"EarlyStopping": EarlyStopping("val_loss"), "Timer": Timer("00:01:00:00"), "GradientNorm": GradientNorm()}[
        name
    ]


def on_first_rank(strategy: str, name: str, folder: str) -> None:
    callbacks = [_callback(name, folder)] if dist.get_rank() == 0 else []
    loader = batches("byte_gpt", 2, 2)
    saves = name == "ModelCheckpoint" and bool(callbacks)  # else, Lightning gives the other rank one of its own
    trainer_for(strategy, 2, callbacks=callbacks, enable_checkpointing=saves).fit(ByteGPT(), loader, loader)


@pytest.mark.parametrize("strategy", ["ddp_custom", "fsdp_custom"])
@pytest.mark.parametrize("name", MEETING)
def test_a_callback_in_which_ranks_meet_belongs_to_all(ranks: Any, tmp_path: Path, strategy: str, name: str) -> None:
    said = rf"rank 0 alone has callback {name}.* under trainer.is_global_zero"
    with pytest.raises(RankError, match=said):
        ranks(2).run(on_first_rank, strategy, name, str(tmp_path))


def watched_by_first_rank(strategy: str, folder: str) -> int:
    own: dict[str, Any] = {}
    if dist.get_rank() == 0:
        own = {"logger": CSVLogger(folder), "callbacks": [LearningRateMonitor(), ModelSummary(3)]}
    trainer = trainer_for(strategy, 2, **own)
    trainer.fit(ByteGPT(), batches("byte_gpt", 2, 3))
    return int(trainer.global_step)


@pytest.mark.parametrize("strategy", ["ddp_custom", "fsdp_custom"])
def test_loggers_and_what_one_rank_looks_at_are_its_own(ranks: Any, tmp_path: Path, strategy: str) -> None:
    assert ranks(2).run(watched_by_first_rank, strategy, str(tmp_path)) == [3, 3]

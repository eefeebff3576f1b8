"""Parts of tensors that hooks put into a checkpoint are whole in the file, as one process would have written it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torchmetrics import SumMetric

from lightning_parallel import CheckpointError, ConfigurationError
from lightning_parallel.checkpoint.sharded_folder import open_folder
from tests.data import loader
from tests.jobs.first_steps import said
from tests.models.pipelined import DeepTied
from tests.names import num_readers
from tests.parity import TOLERANCE, trainer_for


class Averages(DeepTied):
    """Averages its weights by hand, and saves them by name and in a list."""

    average: dict[str, Tensor]

    def on_train_start(self) -> None:
        self.average = {name: value.detach().clone() for name, value in self.state_dict().items()}

    def on_train_batch_end(self, *args: Any) -> None:
        for name, value in self.state_dict().items():
            self.average[name].mul_(0.9).add_(value.detach(), alpha=0.1)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = {"average": self.average, "rest": [(1, "two"), {"values": self.values()}]}

    def values(self) -> list[Tensor]:
        return list(self.average.values())


class Moments(Averages):
    """Saves moments of its optimizer, too; under a pipeline, nobody may read those of another stage."""

    def values(self) -> list[Tensor]:
        states = self.optimizers(use_pl_optimizer=False).state  # type: ignore[union-attr]
        return [states[p]["exp_avg"] for p in self.parameters() if p in states]


class OfFirstRank(Averages):
    """On rank 0 alone: nobody else would help to gather."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.global_rank == 0:
            checkpoint["mine"] = self.average


class PartsOfOne(Averages):
    """Parts on one rank, and plain tensors on the others."""

    owner = 0

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        own = self.global_rank == self.owner
        checkpoint["mine"] = {name: value if own else torch.zeros(1) for name, value in self.average.items()}


class PartsOfAnother(PartsOfOne):
    owner = 1


class PartsOfShapes(Averages):
    """Of each rank another one."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = list(self.average.values())[self.global_rank]


class Counts(DeepTied):
    """Saves what a metric has counted."""

    def __init__(self, optimizer: str, *, keeps: bool = True) -> None:
        super().__init__(optimizer)
        self.count = SumMetric()
        self.count.persistent(keeps)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.count.update(len(batch[0]))
        return super().training_step(batch, batch_idx)


class CountsAnew(Counts):
    """As metrics are by default."""

    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer, keeps=False)


class Saves(Callback):
    """Saves behind the second step, and keeps parts in its state."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.kept: list[Tensor] = []

    def state_dict(self) -> dict[str, Any]:
        return {"kept": self.kept}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.kept = [pl_module.model.head.weight.detach()] if "pp" not in str(self.path) else []
        if batch_idx == 1:
            trainer.save_checkpoint(self.path)


def saved(make: Any, strategy: str, num_ranks: int, path: Path, readers: int = 1) -> str:
    """Two steps and a save; what it is refused with."""
    L.seed_everything(3, verbose=False)
    trainer = trainer_for(strategy, num_ranks, max_steps=2, limit_val_batches=0, callbacks=[Saves(path)])
    try:
        trainer.fit(make("adamw"), loader(readers))
    except (CheckpointError, ConfigurationError) as error:
        return str(error)
    return ""


def read(path: Path) -> dict[str, Any]:
    if path.is_dir():
        return dict(open_folder(path, lambda rest: torch.load(rest, weights_only=True)))
    return torch.load(path, weights_only=True)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "strategy",
    ["ddp_custom", "fsdp_custom", "tp_custom", "pp_custom", "fsdp_custom:checkpoint=async-whole"]
    + [f"{name}_custom:checkpoint=sharded" for name in ("fsdp", "pp")],
)
def test_they_are_whole(strategy: str, ranks: Any, tmp_path: Path) -> None:
    name = strategy.partition("_")[0]
    make = Averages if name == "pp" else Moments
    readers, path = num_readers(f"{name}_custom", 2), tmp_path / f"{name}.ckpt"
    assert ranks(2).run(saved, make, strategy, 2, path, readers, deadline=60) == ["", ""]
    saved(make, "auto", 1, tmp_path / f"{name}_one.ckpt")
    ours, theirs = read(path)["mine"], read(tmp_path / f"{name}_one.ckpt")["mine"]
    (numbers, own), (same, of_one) = ours["rest"], theirs["rest"]
    assert numbers == same == (1, "two")
    assert list(ours["average"]) == list(theirs["average"])
    assert len(own["values"]) == len(of_one["values"]) > 0
    pairs = zip(
        [*ours["average"].values(), *own["values"]], [*theirs["average"].values(), *of_one["values"]], strict=True
    )
    assert all(type(value) is Tensor and torch.allclose(value, other, atol=TOLERANCE) for value, other in pairs)


def test_in_a_product(ranks: Any, tmp_path: Path) -> None:
    path = tmp_path / "pp.ckpt"
    assert ranks(4).run(saved, Averages, "fsdp_custom:shard=2,pipeline=2", 4, path, 2, deadline=60) == [""] * 4
    saved(Averages, "auto", 1, tmp_path / "pp_one.ckpt")
    ours, theirs = read(path)["mine"]["average"], read(tmp_path / "pp_one.ckpt")["mine"]["average"]
    assert all(torch.allclose(ours[name], value, atol=TOLERANCE) for name, value in theirs.items())


@pytest.mark.parametrize("make", [OfFirstRank, PartsOfOne, PartsOfShapes])
def test_what_ranks_do_not_keep_alike_is_refused(make: Any, ranks: Any, tmp_path: Path) -> None:
    for words in ranks(2).run(saved, make, "fsdp_custom", 2, tmp_path / "x.ckpt", 2, deadline=60):
        assert "would copy this rank's part of a tensor" in words


def test_what_the_rank_that_writes_has_as_a_whole_is_written(ranks: Any, tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    assert ranks(2).run(saved, PartsOfAnother, "fsdp_custom", 2, path, 2, deadline=60) == ["", ""]
    assert all(value.shape == (1,) for value in read(path)["mine"].values())


def told(make: Any, strategy: str, path: Path, readers: int) -> list[str]:
    with said("the checkpoint keeps the states of") as lines:
        saved(make, strategy, 2, path, readers)
    return lines


def test_metrics_that_are_saved_as_one_rank_has_them(ranks: Any, tmp_path: Path) -> None:
    path = tmp_path / "pp.ckpt"
    (words,) = ranks(2).run(told, Counts, "fsdp_custom", path, 2, deadline=60)[0]
    assert "the states of count as the first of the 2 ranks" in words
    assert not ranks(2).run(told, CountsAnew, "fsdp_custom", path, 2, deadline=60)[0]
    assert not ranks(2).run(told, Counts, "tp_custom", path, 1, deadline=60)[0]  # both have counted all samples

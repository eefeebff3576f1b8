"""Callbacks that write predictions write each sample once, where ranks share samples and where they do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BasePredictionWriter
from torch.utils.data import DataLoader

from tests.data import data_of
from tests.models.pipelined import DeepTied
from tests.names import num_ranks, num_readers
from tests.parity import trainer_for

SAMPLES = 16
PRODUCTS = [("fsdp_custom:pipeline=2", 4, 2)]
"""A name with options, the number of ranks, and how many of them read different samples."""
NAMES = [
    (name, num_ranks(name), num_readers(name, num_ranks(name)))
    for name in ("ddp_custom", "fsdp_custom", "cp_custom", "tp_custom", "pp_custom")
]


class Predicts(DeepTied):
    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch[0]).sum((1, 2))


class Files(BasePredictionWriter):
    """A file for each call, named by rank; and one with everything, by rank 0."""

    def __init__(self, folder: str) -> None:
        super().__init__("batch_and_epoch")
        self.folder = Path(folder)

    def save(self, trainer: Any, name: str, predictions: Any, indices: Any) -> None:
        torch.save((predictions, indices), self.folder / f"{name}-of-{trainer.global_rank}")

    def write_on_batch_end(
        self, trainer: Any, pl_module: Any, prediction: Any, batch_indices: Any, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        self.save(trainer, f"batch-{batch_idx}", prediction, batch_indices)

    def write_on_epoch_end(self, trainer: Any, pl_module: Any, predictions: Any, batch_indices: Any) -> None:
        own = torch.cat(predictions), [index for batch in batch_indices[0] for index in batch]
        self.save(trainer, "epoch", *own)
        found: list[Any] = [own]
        if dist.is_initialized():
            found = [None] * dist.get_world_size()
            dist.all_gather_object(found, own)
        trainer.strategy.barrier()
        if trainer.is_global_zero:
            self.save(trainer, "all", torch.cat([each for each, _ in found]), [i for _, part in found for i in part])


def predicted(strategy: str, size: int, folder: str) -> Any:
    """Predict with a writer; what comes back, and what the writer looks like afterwards."""
    L.seed_everything(3, verbose=False)
    files = Files(folder)
    trainer = trainer_for(strategy, size, callbacks=[files])
    found = trainer.predict(Predicts(), DataLoader(data_of("byte_gpt", SAMPLES, SAMPLES), batch_size=4))
    return torch.cat(found), sorted(vars(files))


def written(folder: Path, pattern: str) -> tuple[torch.Tensor, list[int]]:
    """Predictions of all files that match, by the index of the sample, and these indices."""
    files = [torch.load(path) for path in folder.glob(pattern)]
    indices = torch.tensor([index for _, part in files for index in part])
    order = indices.argsort()
    return torch.cat([each for each, _ in files])[order], indices[order].tolist()


@pytest.mark.parametrize(("name", "size", "readers"), [*NAMES, *PRODUCTS], ids=str)
def test_each_sample_is_written_once(name: str, size: int, readers: int, ranks: Any, tmp_path: Path) -> None:
    expected, attributes = predicted("auto", 1, str(tmp_path))
    ours = tmp_path / "ours"
    ours.mkdir()
    for found, left in ranks(size).run(predicted, name, size, str(ours)):
        assert len(found) == SAMPLES // readers
        assert left == attributes
    assert len(list(ours.glob("epoch-of-*"))) == readers
    for pattern in ("batch-*", "epoch-*", "all-*"):
        values, indices = written(ours, pattern)
        assert indices == list(range(SAMPLES)), pattern
        assert torch.allclose(values, expected, atol=1e-4), pattern

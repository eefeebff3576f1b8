"""Workers of loaders are forks, which have the process groups of earlier runs, and none of their threads."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from lightning_parallel import build_strategy
from lightning_parallel.presets import PRESETS

DEADLINE = 30.0


class Collecting(Dataset[torch.Tensor]):
    """Samples of a dataset in whose workers garbage is collected, as happens there at any time."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        gc.collect()
        return torch.full((3,), float(index))


class Linear(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def leave_a_group() -> None:
    """A group that nothing refers to but itself, as a strategy of an earlier run and what it has made do."""
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    holder: list[object] = [dist.new_group([0])]
    holder.append(holder)
    dist.destroy_process_group()


@pytest.fixture
def _without_collection() -> Iterator[None]:
    """Nothing is collected in this process meanwhile."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    gc.collect()


def fit(name: str) -> None:
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=build_strategy(name),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Linear(), DataLoader(Collecting(), batch_size=2, num_workers=1, timeout=DEADLINE))


@pytest.mark.slow
@pytest.mark.usefixtures("_without_collection")
@pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers")
@pytest.mark.parametrize("name", [name for name in PRESETS if name != "dp_custom"])
def test_a_worker_collects_garbage(name: str) -> None:
    leave_a_group()
    fit(name)  # a worker that waits for ever ends the fit by the loader's timeout

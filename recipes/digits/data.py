"""The handwritten digits that scikit-learn ships."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningDataModule
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset, random_split
from typing_extensions import override


class Digits(LightningDataModule):
    """1797 images of 8 x 8 pixels; 70 % to train on, 15 % for validation, 15 % for the test.

    A batch is images, float32 of shape (batch_size, 1, 8, 8), values 0 to 1; and classes, int64 of shape (batch_size,),
    values 0 to 9.

    Args:
        batch_size: The number of images in a batch of one process.
        num_workers: The number of processes that read; 0 reads in the training process, where the images are in memory.
        split_seed: Decides which image is in which part.
    """

    def __init__(self, batch_size: int = 32, num_workers: int = 0, split_seed: int = 0) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.split_seed = split_seed

    @override
    def setup(self, stage: str) -> None:
        images, classes = load_digits(return_X_y=True)
        pixels = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
        digits = TensorDataset(pixels, torch.tensor(classes))
        generator = torch.Generator().manual_seed(self.split_seed)
        self.train, self.val, self.test = random_split(digits, [0.7, 0.15, 0.15], generator)

    @override
    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(
            self.train, batch_size=self.batch_size, num_workers=self.num_workers, shuffle=True, drop_last=True
        )

    @override
    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return self._in_order(self.val)

    @override
    def test_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return self._in_order(self.test)

    def _in_order(self, dataset: Dataset[tuple[Tensor, ...]]) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(dataset, batch_size=self.batch_size, num_workers=self.num_workers)

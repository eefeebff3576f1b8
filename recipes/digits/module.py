"""A small convolutional network, trained with plain Lightning."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy
from typing_extensions import override

NUM_CLASSES = 10


class DigitClassifier(LightningModule):
    """Names the digit in an image; logs `train_loss` in nats, `val_acc` and `test_acc` as shares from 0 to 1.

    A batch is images, float32 of shape (batch, 1, 8, 8), and classes, int64 of shape (batch,), values 0 to 9.

    Args:
        width: Channels of the first convolution; the second has twice as many. Divisible by 8.
        learning_rate: Of AdamW.
    """

    def __init__(self, width: int = 32, learning_rate: float = 2e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        self.model = nn.Sequential(
            nn.Conv2d(1, width, kernel_size=3, padding=1),
            nn.GroupNorm(8, width),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, kernel_size=3, padding=1),
            nn.GroupNorm(8, 2 * width),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(2 * width * 2 * 2, NUM_CLASSES),
        )
        self.val_accuracy = MulticlassAccuracy(NUM_CLASSES, average="micro")
        self.test_accuracy = MulticlassAccuracy(NUM_CLASSES, average="micro")

    @override
    def forward(self, images: Tensor) -> Tensor:
        """Logits of shape (batch, 10)."""
        return self.model(images)

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, classes = batch
        loss = F.cross_entropy(self(images), classes)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    @override
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, classes = batch
        self.val_accuracy(self(images), classes)
        self.log("val_acc", self.val_accuracy, prog_bar=True)

    @override
    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, classes = batch
        self.test_accuracy(self(images), classes)
        self.log("test_acc", self.test_accuracy)

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)

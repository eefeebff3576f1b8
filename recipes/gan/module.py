"""Two networks against each other, with two optimizers under manual optimization, in plain Lightning."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from typing_extensions import override

NUM_PIXELS = 64


class DigitGAN(LightningModule):
    """Draws images like those it is shown (Goodfellow et al. 2014); logs both losses, and how far the means differ.

    A batch is images, float32 of shape (batch, 1, 8, 8), values 0 to 1, and classes, which it does not look at.

    Args:
        noise_width: Random numbers from which an image is drawn.
        width: Features inside of both networks.
        learning_rate: Of both optimizers, Adam.
    """

    def __init__(self, noise_width: int = 16, width: int = 128, learning_rate: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.noise_width = noise_width
        self.learning_rate = learning_rate
        self.generator = nn.Sequential(
            nn.Linear(noise_width, width), nn.ReLU(), nn.Linear(width, NUM_PIXELS), nn.Sigmoid()
        )
        self.critic = nn.Sequential(nn.Linear(NUM_PIXELS, width), nn.LeakyReLU(0.2), nn.Linear(width, 1))

    @override
    def forward(self, noise: Tensor) -> Tensor:
        """Images of shape (batch, 64) from noise of shape (batch, noise_width)."""
        return self.generator(noise)

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        real = batch[0].flatten(1)
        of_generator, of_critic = self.optimizers()

        with of_critic.toggle_model():
            false = self(self.noise(real)).detach()
            loss = self.judge(real, is_real=True) + self.judge(false, is_real=False)
            self.manual_backward(loss)
            of_critic.step()
            of_critic.zero_grad()
            self.log("critic_loss", loss, prog_bar=True)

        with of_generator.toggle_model():
            loss = self.judge(self(self.noise(real)), is_real=True)
            self.manual_backward(loss)
            of_generator.step()
            of_generator.zero_grad()
            self.log("generator_loss", loss, prog_bar=True)

    @override
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        real = batch[0].flatten(1)
        difference = (real.mean(0) - self(self.noise(real)).mean(0)).abs().mean()
        self.log("val_difference", difference, prog_bar=True, sync_dist=True)

    def noise(self, like: Tensor) -> Tensor:
        """Normal numbers of shape (batch, noise_width), on the device of `like`."""
        return torch.randn(len(like), self.noise_width, device=like.device)

    def judge(self, images: Tensor, *, is_real: bool) -> Tensor:
        """The cross-entropy of the critic's answer, in nats."""
        answers = self.critic(images)
        return F.binary_cross_entropy_with_logits(answers, torch.full_like(answers, float(is_real)))

    @override
    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.Adam(network.parameters(), lr=self.learning_rate, betas=(0.5, 0.99))
            for network in (self.generator, self.critic)
        ]

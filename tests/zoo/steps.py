"""LightningModules around public models, each with the training step that one would write, and their samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

VOCABULARY = 64
LENGTH = 16
CLASSES = 4
STEPS = 3
GLOBAL_BATCH = 8


class Training(L.LightningModule):
    """A model and its optimizer.

    SGD, since a gradient that is too large or too small by a factor moves the weights by that factor: Adam divides it
    away.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def samples(self, number: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        """What the data has for each sample, `number` of them."""
        raise NotImplementedError

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)


def tokens_of(number: int, generator: torch.Generator, length: int = LENGTH) -> Tensor:
    return torch.randint(1, VOCABULARY, (number, length), generator=generator)


class LanguageModel(Training):
    """Predicts each next token, or, if the model says so, each token; the model computes the loss."""

    def samples(self, number: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        return (tokens_of(number, generator),)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        (tokens,) = batch
        loss = self.model(input_ids=tokens, labels=tokens).loss
        self.log("train_loss", loss)
        return loss


class PaddedModel(LanguageModel):
    """The same with padding at the end, which the model is not to look at; the number of labels is that of all."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        (tokens,) = batch
        mask = (torch.arange(tokens.shape[1], device=tokens.device) < 11 + tokens[:, :1] % 5).long()
        loss = self.model(input_ids=tokens, attention_mask=mask, labels=tokens).loss
        self.log("train_loss", loss)
        return loss


class TextClassifier(Training):
    """A class for each text."""

    def samples(self, number: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        return tokens_of(number, generator), torch.randint(CLASSES, (number,), generator=generator)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        tokens, labels = batch
        loss = F.cross_entropy(self.model(input_ids=tokens).logits, labels)
        self.log("train_loss", loss)
        return loss


class Translation(Training):
    """Reads a text and writes another one."""

    def samples(self, number: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        return tokens_of(number, generator), tokens_of(number, generator, 12)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        source, target = batch
        loss = self.model(input_ids=source, labels=target).loss
        self.log("train_loss", loss)
        return loss


class ImageClassifier(Training):
    """A class for each image.

    Args:
        model: Gives logits, or an object that has them.
        size: Height and width of the images.
    """

    def __init__(self, model: nn.Module, size: int = 32) -> None:
        super().__init__(model)
        self.size = size

    def samples(self, number: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        images = torch.randn(number, 3, self.size, self.size, generator=generator)
        return images, torch.randint(CLASSES, (number,), generator=generator)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        output = self.model(images)
        loss = F.cross_entropy(output if isinstance(output, Tensor) else output.logits, labels)
        self.log("train_loss", loss)
        return loss


class Custom(Training):
    """A model whose inputs and loss are its own.

    Args:
        model: The model.
        draw: The samples, from their number and a generator.
        loss: The loss of a batch, from the model and what the data has.
    """

    def __init__(
        self,
        model: nn.Module,
        draw: Callable[[int, torch.Generator], tuple[Tensor, ...]],
        loss: Callable[..., Tensor],
    ) -> None:
        super().__init__(model)
        self.draw, self.loss = draw, loss

    def samples(self, number: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        return self.draw(number, generator)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(self.model, *batch)
        self.log("train_loss", loss)
        return loss


class Published:
    """A LightningModule as others have written it, but for its optimizer, which is that of `Training`.

    Args:
        module: The module; one that optimizes by itself keeps its optimizers.
        samples: Its samples.
        collate: Makes a batch of some; torch's own by itself.
    """

    def __init__(
        self, module: L.LightningModule, samples: Sequence[Any], collate: Callable[[Any], Any] | None = None
    ) -> None:
        self.module, self.samples, self.collate = module, samples, collate
        for part in module.modules():
            if isinstance(part, nn.Dropout | nn.MultiheadAttention | nn.LSTM):
                setattr(part, "p" if isinstance(part, nn.Dropout) else "dropout", 0.0)
        if module.automatic_optimization:
            trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
            module.configure_optimizers = lambda: torch.optim.SGD(trained, lr=0.02, momentum=0.9)  # type: ignore[method-assign]


class FrozenStatistics(Callback):
    """Statistics of batches are frozen: those of a part of a batch are others by definition."""

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for module in pl_module.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.eval()


def loader_of(built: Training | Published, readers: int) -> DataLoader[Any]:
    """The batches of ranks of which `readers` read different samples; Lightning deals the samples out."""
    size = GLOBAL_BATCH // readers
    if isinstance(built, Published):
        samples: Any = built.samples
        return DataLoader(samples, batch_size=size, shuffle=False, collate_fn=built.collate)
    data = TensorDataset(*built.samples(STEPS * GLOBAL_BATCH, torch.Generator().manual_seed(7)))
    return DataLoader(data, batch_size=size, shuffle=False)

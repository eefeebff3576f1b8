"""What people do in hooks with elements of weights, random numbers, buffers and collectives, on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from lightning_parallel import ConfigurationError
from tests.models.cases import Block, next_token_loss
from tests.models.habits import Habit


class Elements(Habit):
    """Operations for which parts are not enough, on all ranks."""

    def on_train_batch_end(self, *args: Any) -> None:
        for block in (self.model.blocks[0], self.model.blocks[2]):
            weight = block.mlp[0].weight.detach()
            self.seen += [float(weight[0, 0]), float(weight[-1].sum()), float(weight.norm() ** 2)]
            self.seen += [float(torch.equal(weight, weight.clone())), float(torch.equal(weight, weight + 1))]
            self.seen += [float(weight.argmax()), float(weight.abs().argmin(0).sum())]


class Joined(Habit):
    """All gradients, or all weights, in one vector."""

    def on_before_optimizer_step(self, *args: Any) -> None:
        gradients = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
        self.seen.append(float(torch.cat([gradient.flatten() for gradient in gradients]).norm()))
        self.seen.append(float(parameters_to_vector(self.parameters()).detach().norm()))


class ElementOfRankZero(Habit):
    def on_train_batch_end(self, *args: Any) -> None:
        if self.trainer.is_global_zero:
            self.seen.append(float(self.model.blocks[2].mlp[0].weight[0, 0]))


class AloneEverywhere(Habit):
    """Operations of rank 0 alone, whose refusals it notes, while the others wait for it to be done."""

    def __init__(self) -> None:
        super().__init__()
        self.words: list[str] = []

    def on_before_optimizer_step(self, *args: Any) -> None:
        weight: Any = self.model.blocks[2].mlp[0].weight
        if self.trainer.is_global_zero and not self.words:
            self.note(lambda: weight[0])
            self.note(lambda: weight.grad.norm() ** 2)
            self.note(weight.argmax)
            self.note(weight.full_tensor)
            self.note(lambda: torch.equal(weight, weight.detach().clone()))
            self.note(lambda: torch.nn.utils.clip_grad_norm_([weight], 1.0))
            self.note(lambda: torch.randn_like(weight)[0])
        dist.barrier()

    def note(self, look: Callable[[], Any]) -> None:
        try:
            look()
        except ConfigurationError as error:
            self.words.append(str(error))


class ReadersOfLightningAlone(AloneEverywhere):
    """What Lightning reads of all parameters, on rank 0 alone."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:  # type: ignore[override]
        if self.trainer.is_global_zero and not self.words:
            self.note(lambda: grad_norm(self, norm_type=2))
            self.note(lambda: BaseFinetuning.filter_on_optimizer(optimizer, self.parameters()))
        self.trainer.strategy.barrier()


class Noise(Habit):
    """Weights that are jittered, set anew and dropped, and numbers that are drawn afterwards."""

    @torch.no_grad()
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for parameter in self.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.01)
        if batch_idx == 1:
            nn.init.xavier_uniform_(self.model.blocks[0].mlp[0].weight)
            self.model.blocks[2].mlp[0].weight.normal_(0.0, 0.02)
        for block in self.model.blocks:
            weight = block.mlp[2].weight
            weight.mul_(torch.bernoulli(torch.full_like(weight, 0.9)))
            weight.copy_(F.dropout(weight, 0.1))
            weight.add_(torch.rand_like(weight), alpha=0.01)
        self.seen.append(float(torch.rand(())))


class OddNoise(Habit):
    """Noise of a parameter that two ranks cannot halve."""

    def __init__(self) -> None:
        super().__init__()
        self.odd = nn.Parameter(torch.ones(5, 3))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + self.odd.pow(2).mean()

    @torch.no_grad()
    def on_train_batch_end(self, *args: Any) -> None:
        self.odd.add_(torch.randn_like(self.odd))
        self.seen.append(float(torch.rand(())))


class DataOfAnother(Habit):
    """Two layers that share their values from the second step on."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        first, last = self.model.blocks[0].mlp[0].weight, self.model.blocks[2].mlp[0].weight
        last.data = first.data.clone()


class DataOfVector(Habit):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        vector = parameters_to_vector(self.parameters())
        vector_to_parameters(vector * 0.9, self.parameters())


class CountingBlock(Block):
    """A layer that keeps sums, in place and anew."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("num_samples", torch.tensor(0))
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.num_samples += x.shape[0]
            self.total = self.total + x.detach().sum() / 1000
        return super().forward(x)


class CountingLogits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(()))

    def forward(self, logits: Tensor) -> Tensor:
        self.total += logits.detach().sum() / 1000
        return logits


class Counting(Habit):
    """Layers that keep sums, and a module behind them that is registered before; hooks read them, and set one back."""

    def __init__(self) -> None:
        super().__init__()
        model = self.model
        del self.model
        self.logits, self.model = CountingLogits(), model
        for index in range(len(model.blocks)):
            model.blocks[index] = CountingBlock()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return next_token_loss(self.logits(self.model(batch[0])), batch[0])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(float(self.logits.total))
        for block in self.model.blocks:
            self.seen += [float(block.num_samples), float(block.total)]
            if batch_idx == 1:
                block.num_samples.zero_()


class Collective(Habit):
    """A loss that is averaged by hand, as under DDP."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if dist.is_initialized():
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            self.log("mean", mean / dist.get_world_size())
        return loss


class CollectiveBefore(Habit):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if dist.is_initialized():
            dist.barrier(group=dist.group.WORLD)
        return super().training_step(batch, batch_idx)


class Gathering(Habit):
    """Losses of the ranks that read other samples."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("mean", self.all_gather(loss.detach()).mean())
        return loss

"""What people do around layers and gradients, on one device."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.data import GLOBAL_BATCH
from tests.models.cases import GPT, VOCABULARY, Block, next_token_loss, optimizer_of


class Tokens(L.LightningModule):
    """A GPT whose parts are to be replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.model = GPT()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return next_token_loss(self.model(batch[0]), batch[0])

    def configure_optimizers(self) -> Any:
        return optimizer_of("sgd", [p for p in self.parameters() if p.requires_grad])


class Teacher(Tokens):
    """As in MoCo and BYOL: the teacher's weights are assigned."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.model).requires_grad_(False)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        logits = self.model(batch[0])
        with torch.no_grad():
            target = self.teacher(batch[0])
        return next_token_loss(logits, batch[0]) + F.mse_loss(logits, target)

    def on_train_batch_end(self, *args: Any) -> None:
        for student, teacher in zip(self.model.parameters(), self.teacher.parameters(), strict=True):
            teacher.data = teacher.data * 0.5 + student.data * 0.5


class Actor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.Tanh(), nn.Linear(8, 8))
        self.log_std = nn.Parameter(torch.zeros(8))

    def forward(self, tokens: Tensor) -> Any:
        return torch.distributions.Normal(self.net(tokens), self.log_std.exp())


class ActorCritic(Tokens):
    """The actor returns a distribution, which hides its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.actor, self.critic = Actor(), nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.Linear(8, 1))
        del self.model

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:  # type: ignore[override]
        actor, critic = self.optimizers()  # type: ignore[misc]
        loss = -self.actor(batch[0]).log_prob(torch.linspace(-1, 1, 8)).mean()
        actor.zero_grad()
        self.manual_backward(loss)
        actor.step()
        value = self.critic(batch[0]).pow(2).mean()
        critic.zero_grad()
        self.manual_backward(value)
        critic.step()
        return loss.detach()

    def configure_optimizers(self) -> Any:
        return [optimizer_of("sgd", list(net.parameters())) for net in (self.actor, self.critic)]


class Contrastive(Tokens):
    """A term over the samples of all ranks."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        logits = self.model(batch[0])
        pooled: Any = self.all_gather(logits.mean(1), sync_grads=True)
        pooled = pooled.reshape(-1, logits.shape[-1])
        assert len(pooled) == GLOBAL_BATCH
        spread = (pooled[:, None] - pooled[None]).pow(2).mean()
        return next_token_loss(logits, batch[0]) + spread


class Unused(Tokens):
    """Parameters that no step uses, under an optimizer that would decay them."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.model.blocks:
            block.extra = nn.Linear(16, 16)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4, weight_decay=0.5)


class ZerosKept(Tokens):
    """A head that only the first steps use, whose gradient stays as zeros, so that momentum and decay go on."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(VOCABULARY, VOCABULARY)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        logits = self.model(batch[0])
        return next_token_loss(self.extra(logits) if batch_idx < 2 else logits, batch[0])

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


class Collecting(Tokens):
    """An auxiliary loss over what hooks collect inside of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.collected: list[Tensor] = []
        for block in self.model.blocks:
            block.mlp.register_forward_hook(lambda module, args, output: self.collected.append(output))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        assert len(self.collected) == len(self.model.blocks)
        loss = loss + 1e-2 * sum(output.pow(2).mean() for output in self.collected)
        self.collected.clear()
        return loss


class Positions(nn.Module):
    """A table that is made anew when it is too short."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def forward(self, length: int) -> Tensor:
        if length > len(self.table):
            self.register_buffer("table", torch.arange(float(length)), persistent=False)
        return self.table[:length]


class GrowingBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.positions = Positions()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 1e-2 * self.positions(x.shape[1])[None, :, None])


class Growing(Tokens):
    """Buffers of layers have other sizes after the first step, and one is new."""

    def __init__(self) -> None:
        super().__init__()
        self.model.blocks = nn.ModuleList(GrowingBlock() for _ in range(4))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.register_buffer("seen", loss.detach(), persistent=False)
        return loss


class Adapted(Tokens):
    """Adapters that hooks add to results, and one hook that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.adapters = nn.ModuleList(nn.Linear(16, 16) for _ in self.model.blocks)
        for block, adapter in zip(self.model.blocks, self.adapters, strict=True):
            block.norm1.register_forward_hook(lambda module, args, output, adapter=adapter: output + adapter(args[0]))
            block.norm2.register_forward_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.calls += 1

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        assert self.calls == (batch_idx + 1) * len(self.model.blocks)
        return loss


class AdaptedByList(Tokens):
    """Adapters that hooks take from a list of the script."""

    def __init__(self) -> None:
        super().__init__()
        self.adapters = nn.ModuleList(nn.Linear(16, 16) for _ in self.model.blocks)
        of_script = list(self.adapters)
        for index, block in enumerate(self.model.blocks):
            block.norm1.register_forward_hook(
                lambda module, args, output, index=index: output + of_script[index](args[0])
            )


class AdaptedByScript(Tokens):
    """The same from an object of the script, of which a copy of the module knows nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.adapters = nn.ModuleList(nn.Linear(16, 16) for _ in self.model.blocks)
        of_script = SimpleNamespace(adapters=list(self.adapters))
        for index, block in enumerate(self.model.blocks):
            block.norm1.register_forward_hook(
                lambda module, args, output, index=index: output + of_script.adapters[index](args[0])
            )


class BrokenOff(Tokens):
    """Ends an epoch in the middle of an accumulation window."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 3 and self.current_epoch == 0 else None


class Dropping(Tokens):
    """Throws away the gradients of every third backward."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        with optimizer.toggle_model(sync_grad=batch_idx % 3 == 2):
            self.manual_backward(loss)
        if batch_idx % 3 == 0:
            optimizer.zero_grad()
        elif batch_idx % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()


class NormsOfLogits(Tokens):
    """Looks at all logits of a token, in ways that a part of them cannot tell."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        logits = self.model(batch[0])
        is_large = (logits > logits.detach().mean() + 1).any(-1).float().mean()
        return next_token_loss(logits, batch[0]) + logits.norm(dim=-1).mean() * (0.1 + is_large)

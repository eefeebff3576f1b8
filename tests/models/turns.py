"""Modules on which no schedule of a pipeline fits: they optimize manually, call layers twice, or sample in hooks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.cases import VOCABULARY, Block, Case, next_token_loss, optimizer_of
from tests.models.pipelined import Deep


class Manual(Deep):
    """One optimizer, by hand, with a schedule and clipping."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        loss = self.loss(*batch)
        self.log("train_loss", loss)
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        optimizer.step()
        schedule: Any = self.lr_schedulers()
        schedule.step()
        return {"loss": loss.detach()}

    def configure_optimizers(self) -> Any:
        optimizer = optimizer_of(self.optimizer_name, self.parameters())
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)]


class TwoOptimizers(Manual):
    """One optimizer for the layers and one for the rest, with a forward for each, of other lengths; reads a loss."""

    def parts(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        layers = list(self.model.blocks.parameters())
        return layers, [p for p in self.parameters() if all(p is not other for other in layers)]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        first, second = self.optimizers()  # type: ignore[misc]
        losses = []
        for optimizer, length in ((first, 16), (second, 8)):
            self.toggle_optimizer(optimizer)
            loss = self.loss(batch[0][:, :length])
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            if loss.item() < 100:
                optimizer.step()
            self.untoggle_optimizer(optimizer)
            losses.append(loss.detach())
        return {"loss": torch.stack(losses).sum()}

    def configure_optimizers(self) -> Any:
        return [optimizer_of(self.optimizer_name, part) for part in self.parts()]


class AcrossStages(TwoOptimizers):
    """Two optimizers, each of parameters of all stages."""

    def parts(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        everything = list(self.parameters())
        return everything[::2], everything[1::2]


class Accumulating(Manual):
    """Updates in every second step, in a closure; a backward that goes twice through the same graph."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        logits = self(*batch)
        loss = next_token_loss(logits, *batch)
        self.manual_backward(loss / 2, retain_graph=True)
        self.manual_backward(1e-2 * logits.square().mean())
        if batch_idx % 2:
            optimizer.step(closure=lambda: loss)
            optimizer.zero_grad()
        return {"loss": loss.detach()}


class Adversarial(Case):
    """A generator of layers, and a critic beside them, whose first loss does not go back through the layers."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.automatic_optimization = False
        self.tokens = nn.Embedding(VOCABULARY, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.critic = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))

    def generate(self, tokens: Tensor) -> Tensor:
        hidden = self.tokens(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        (tokens,) = batch
        generator, critic = self.optimizers()  # type: ignore[misc]
        fake = self.generate(tokens)
        real = F.one_hot(tokens % 16, 16).float()
        apart = F.softplus(-self.critic(real)).mean() + F.softplus(self.critic(fake.detach())).mean()
        critic.zero_grad()
        self.manual_backward(apart)
        critic.step()
        alike = F.softplus(-self.critic(fake)).mean()
        generator.zero_grad()
        self.manual_backward(alike)
        generator.step()
        self.log_dict({"apart": apart, "alike": alike})
        return {"loss": (apart + alike).detach()}

    def configure_optimizers(self) -> Any:
        generator = [*self.tokens.parameters(), *self.blocks.parameters()]
        return [
            optimizer_of(self.optimizer_name, generator),
            optimizer_of(self.optimizer_name, self.critic.parameters()),
        ]


class Checkpointing(Manual):
    """Checkpoints all layers together in its own code, and draws numbers of its own."""

    def loss(self, tokens: Tensor) -> Tensor:
        hidden = self.model.tokens(tokens) + 0.1 * torch.rand(16)
        for pair in (self.model.blocks[:2], self.model.blocks[2:]):
            hidden = torch.utils.checkpoint.checkpoint(nn.Sequential(*pair), hidden, use_reentrant=False)
        return next_token_loss(self.model.head(self.model.norm(hidden)), tokens)


class Dropping(Manual):
    """Dropout inside of the layers."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        for block in self.model.blocks:
            block.mlp.append(nn.Dropout(0.5))
        self.drawn: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        result = super().training_step(batch, batch_idx)
        self.drawn.append(float(torch.rand(())))
        return result


class Siamese(Deep):
    """Two calls of the layers in one step, of other lengths."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        first, second = (batch["first"][0], batch["second"][0]) if isinstance(batch, dict) else (batch[0], batch[0])
        ours, theirs = self(first), self(second[:, :8])
        loss = next_token_loss(ours, first) + (ours.mean((0, 1)) - theirs.mean((0, 1))).square().mean()
        self.log("train_loss", loss)
        return loss


class Refining(Deep):
    """The layers again, on what they have returned, as often as a value says."""

    def loss(self, tokens: Tensor) -> Tensor:
        hidden = self.model.tokens(tokens)
        for block in self.model.blocks:
            hidden = block(hidden)
        if hidden.abs().max() < 1e6:
            for block in self.model.blocks:
                hidden = block(hidden)
        return next_token_loss(self.model.head(self.model.norm(hidden)), tokens)


class HardExperts(nn.Module):
    """Each token goes to one expert, which is given its tokens only: shapes depend on values."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 3)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weight, chosen = self.gate(tokens).softmax(-1).max(-1)
        result = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().squeeze(-1)
            result = result.index_add(0, rows, expert(tokens[rows]) * weight[rows, None])
        return result.view_as(x)


class Routing(Deep):
    """Layers that look at what they compute."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        for block in self.model.blocks:
            block.mlp = HardExperts()


class LookingBetween(Deep):
    """The step looks at hidden states between two layers."""

    def loss(self, tokens: Tensor) -> Tensor:
        hidden = self.model.tokens(tokens)
        for number, block in enumerate(self.model.blocks):
            hidden = block(hidden)
            if number == 1 and hidden.norm() > 1:
                hidden = hidden / hidden.norm()
        return next_token_loss(self.model.head(self.model.norm(hidden)), tokens)


class Sampling(Deep):
    """Samples from the model in hooks and in evaluation, one token after the other."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.sampled: list[list[int]] = []

    @torch.no_grad()
    def sample(self, tokens: Tensor, count: int) -> Tensor:
        is_training = self.training
        self.eval()
        for number in range(count):
            logits = (self if number % 2 else self.model)(tokens)[:, -1]
            likely = logits.argmax(-1, keepdim=True)
            drawn = torch.multinomial(logits.softmax(-1), 1) if number % 3 else likely
            tokens = torch.cat([tokens, drawn], 1)
        self.train(is_training)
        self.sampled += tokens.tolist()
        return tokens

    def on_train_batch_end(self, *_: Any) -> None:
        self.sample(torch.zeros(2, 3, dtype=torch.int64), 3)

    def on_train_epoch_end(self) -> None:
        self.sample(torch.zeros(1, 3, dtype=torch.int64), 6)

    def on_validation_epoch_end(self) -> None:
        self.sample(torch.ones(2, 3, dtype=torch.int64), 4)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        longer = self.sample(batch[0][:, :4], 3)
        self.log("val_sum", longer.float().mean())
        self.log("val_loss", self.loss(*batch))


TURNS: dict[str, type[Case]] = {
    "manual": Manual,
    "two optimizers": TwoOptimizers,
    "across stages": AcrossStages,
    "accumulating": Accumulating,
    "adversarial": Adversarial,
    "siamese": Siamese,
    "refining": Refining,
    "routing": Routing,
    "looking between": LookingBetween,
}
"""Modules whose steps equal those of one process to the last bits."""

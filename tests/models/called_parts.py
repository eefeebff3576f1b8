"""Modules that call a part of a network from outside of that network's own forward."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.cases import VOCABULARY, Block, Case, next_token_loss, optimizer_of

WIDTH = 16


class AutoEncoder(nn.Module):
    """Layers in the middle, which are units of their own, and parts around them."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.decoder = Decoder()
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        latent = self.encoder(self.tokens(tokens))
        return latent, self.head(self.decoder(latent))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, latent: Tensor) -> Tensor:
        return self.last(self.body(latent * self.scale))

    def forward_features(self, latent: Tensor) -> Tensor:
        return self.body(latent * self.scale)

    def features(self, latent: Tensor) -> Tensor:
        return F.linear(latent * self.scale, self.last.weight)


class CallsParts(Case):
    """Calls the parts one after the other, and never the whole."""

    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__(optimizer)
        self.model = AutoEncoder()

    def loss(self, tokens: Tensor) -> Tensor:
        latent = self.model.encoder(self.model.tokens(tokens))
        return next_token_loss(self.model.head(self.model.decoder(latent)), tokens)


class MovesItself(CallsParts):
    """Moves parts of itself, and itself, to where they are: before, in and behind the step."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.to(self.device)
        return super().training_step(batch, batch_idx)

    def loss(self, tokens: Tensor) -> Tensor:
        latent = self.model.encoder.to(tokens.device)(self.model.tokens(tokens))
        self.float()
        self.model.decoder.to(latent)
        return next_token_loss(self.model.head.cpu()(self.model.decoder(latent)), tokens)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.model.to(self.device)

    def on_train_batch_end(self, *args: Any) -> None:
        self.cpu()


class CallsWholeAndParts(CallsParts):
    """Calls the whole, and two parts again, on inputs with and without a gradient; one of them in evaluation, too."""

    def loss(self, tokens: Tensor) -> Tensor:
        latent, logits = self.model(tokens)
        again = self.model.encoder(self.model.tokens(tokens.flip(1)))
        with torch.no_grad():
            target = self.model.encoder(latent)
        features = self.model.decoder.forward_features(again)
        return next_token_loss(logits, tokens) + F.mse_loss(again, target) + 1e-2 * features.square().mean()


class CallsAMethod(CallsParts):
    """Calls a method of a part under a name of its own, and sometimes a part that no forward of the whole has run."""

    def loss(self, tokens: Tensor) -> Tensor:
        latent = self.model.encoder(self.model.tokens(tokens))
        return next_token_loss(self.model.head(self.model.decoder.features(latent)), tokens)


class ReadsAWeight(CallsParts):
    """Reads a parameter of a part, without any call."""

    def loss(self, tokens: Tensor) -> Tensor:
        latent, logits = self.model(tokens)
        return next_token_loss(logits, tokens) + 1e-2 * F.linear(latent, self.model.head.weight).square().mean()


class SamplesFromAPart(CallsParts):
    """Calls a part in a hook, outside of any step."""

    def on_train_epoch_end(self) -> None:
        with torch.no_grad():
            self.sampled = self.model.decoder(torch.ones(1, 1, WIDTH))


class GradientsInHooks(CallsParts):
    """Calls the network between backward and the update."""

    def on_after_backward(self) -> None:
        with torch.no_grad():
            self.sampled = self.model.decoder(torch.ones(1, 1, WIDTH))
            self.whole = self.model(torch.zeros(1, 4, dtype=torch.long))


class Scores(CallsParts):
    """Reads a parameter in a method that a hook calls."""

    def score(self) -> Tensor:
        return F.linear(torch.ones(1, WIDTH), self.model.head.weight)

    def on_train_epoch_end(self) -> None:
        with torch.no_grad():
            self.scored = self.score()


class CallsAfterBackward(Case):
    """As anomalib's Ganomaly: a part of the generator's network is called before and after a backward."""

    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__(optimizer)
        self.automatic_optimization = False
        self.model = Ganomaly()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        generator, discriminator = self.optimizers()  # type: ignore[misc]
        x = self.model.tokens(batch[0]).detach()
        fake, latent, again = self.model(x)
        real_score = self.model.discriminator(x)
        score = self.model.discriminator(fake)
        loss = F.mse_loss(fake, x) + F.mse_loss(again, latent) + F.mse_loss(score, real_score.detach())
        generator.zero_grad()
        self.manual_backward(loss, retain_graph=True)
        generator.step()
        fake_score = self.model.discriminator(fake.detach())
        loss_of_scores = (real_score - 1).square().mean() + fake_score.square().mean()
        discriminator.zero_grad()
        self.manual_backward(loss_of_scores)
        discriminator.step()
        loss = loss.detach() + loss_of_scores.detach()
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        networks = (self.model.generator, self.model.discriminator)
        return [optimizer_of("sgd", list(net.parameters())) for net in networks]


class Ganomaly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH).requires_grad_(False)
        self.generator = nn.ModuleDict(
            {name: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for name in ("encoder", "decoder", "again")}
        )
        self.discriminator = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        latent = self.generator["encoder"](x)
        fake = self.generator["decoder"](latent)
        return fake, latent, self.generator["again"](fake)


class Conditioned(nn.Module):
    """A norm with an embedding of its own, as diffusers' AdaLayerNormZero."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH))
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        return self.norm(x) * (1 + self.linear(self.emb(label)))[:, None]


class ConditionedBlock(Block):
    def __init__(self) -> None:
        super().__init__(WIDTH)
        self.norm1 = Conditioned()  # type: ignore[assignment]

    def forward(self, x: Tensor, label: Tensor) -> Tensor:  # type: ignore[override]
        x = x + self.attention(self.norm1(x, label))
        return x + self.mlp(self.norm2(x))


class DiT(nn.Module):
    """As diffusers' DiTTransformer2DModel, which conditions its end by the embedding of its first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(ConditionedBlock() for _ in range(3))
        self.shift, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x, label = self.tokens(tokens), tokens[:, 0]
        for block in self.blocks:
            x = block(x, label)
        conditioning = self.blocks[0].norm1.emb(label)  # type: ignore[union-attr, operator]
        return self.head(x + self.shift(F.silu(conditioning))[:, None])


class CallsAPartOfALayer(Case):
    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__(optimizer)
        self.model = DiT()

    def loss(self, tokens: Tensor) -> Tensor:
        return next_token_loss(self.model(tokens), tokens)


class CompilesAPart(CallsParts):
    """One part is compiled, and one calls the parts of another, which is compiled, too."""

    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__(optimizer)
        self.model.encoder = torch.compile(self.model.encoder, backend="aot_eager")  # type: ignore[assignment]
        self.model.decoder.compile(backend="aot_eager")

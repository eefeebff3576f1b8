"""Modules as people write them for one device. None of them knows anything of the package."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 32
LENGTH = 16


def optimizer_of(name: str, parameters: Any) -> torch.optim.Optimizer:
    """SGD with momentum, or AdamW with an eps at which gradients that are zero in exact arithmetic do no harm."""
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-4)


class Case(L.LightningModule):
    """What all cases share: the optimizer's name, and a loss that is a mean over samples of equal weight."""

    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__()
        self.optimizer_name = optimizer

    def loss(self, *batch: Tensor) -> Tensor:
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(*batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(*batch), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(*batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(*batch)

    def configure_optimizers(self) -> Any:
        return optimizer_of(self.optimizer_name, [p for p in self.parameters() if p.requires_grad])


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            t.view(batch, length, self.heads, width // self.heads).transpose(1, 2) for t in self.qkv(x).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, width: int = 16, depth: int = 3) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class ByteGPT(Case):
    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__(optimizer)
        self.model = GPT()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens)

    def loss(self, tokens: Tensor) -> Tensor:
        return next_token_loss(self(tokens), tokens)


class BareParameter(ByteGPT):
    """A parameter on the LightningModule itself, and a learned temperature of no dimension."""

    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__(optimizer)
        self.bias = nn.Parameter(torch.randn(VOCABULARY))
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def loss(self, tokens: Tensor) -> Tensor:
        return next_token_loss(self(tokens) * self.temperature + self.bias, tokens)


class ConvNet(Case):
    """BatchNorm with frozen statistics: with running ones, the statistics of a half batch differ by definition."""

    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__(optimizer)
        self.features = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(),
            nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2),
        )  # fmt: skip
        self.head = nn.Linear(32, 10)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for module in self.features:
            if isinstance(module, nn.BatchNorm2d):
                module.eval()

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.features(images).flatten(1)), labels)


class LSTMModel(Case):
    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__(optimizer)
        self.tokens = nn.Embedding(VOCABULARY, 12)
        self.lstm = nn.LSTM(12, 12, num_layers=2, batch_first=True)
        self.head = nn.Linear(12, VOCABULARY)

    def loss(self, tokens: Tensor) -> Tensor:
        return next_token_loss(self.head(self.lstm(self.tokens(tokens))[0]), tokens)


class HuggingFaceGPT2(Case):
    """Tied embedding and head."""

    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__(optimizer)
        from transformers import GPT2Config, GPT2LMHeadModel

        self.model = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=16, n_layer=2, n_head=2,
                resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, use_cache=False,
            )
        )  # fmt: skip

    def loss(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens, labels=tokens).loss


class LoRA(nn.Module):
    def __init__(self, linear: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, linear.in_features) * 0.1)
        self.up = nn.Parameter(torch.randn(linear.out_features, rank) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + F.linear(F.linear(x, self.down), self.up)


class FrozenWithLoRA(ByteGPT):
    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__(optimizer)
        self.requires_grad_(False)
        for block in self.model.blocks:
            block.attention.qkv = LoRA(block.attention.qkv)
            block.attention.out = LoRA(block.attention.out)


class GAN(L.LightningModule):
    """Manual optimization with two optimizers, a parameter of its own, and a network used twice in a step."""

    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__()
        self.automatic_optimization = False
        self.optimizer_name = optimizer
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
        self.discriminator = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(), nn.Linear(16, 1))
        self.shift = nn.Parameter(torch.zeros(8))

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        noise, real = batch
        generate, discriminate = self.optimizers()

        self.toggle_optimizer(discriminate)
        fake = (self.generator(noise) + self.shift).detach()
        d_loss = F.softplus(-self.discriminator(real)).mean() + F.softplus(self.discriminator(fake)).mean()
        discriminate.zero_grad()
        self.manual_backward(d_loss)
        self.clip_gradients(discriminate, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        discriminate.step()
        self.untoggle_optimizer(discriminate)

        self.toggle_optimizer(generate)
        g_loss = F.softplus(-self.discriminator(self.generator(noise) + self.shift)).mean()
        generate.zero_grad()
        self.manual_backward(g_loss)
        self.clip_gradients(generate, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        generate.step()
        self.untoggle_optimizer(generate)
        return {"loss": (d_loss + g_loss).detach()}

    def configure_optimizers(self) -> Any:
        generator = [*self.generator.parameters(), self.shift]
        return [
            optimizer_of(self.optimizer_name, generator),
            optimizer_of(self.optimizer_name, self.discriminator.parameters()),
        ]


class ParameterGroups(ByteGPT):
    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.parameters() if p.ndim >= 2]
        vectors = [p for p in self.parameters() if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0, "lr": 0.02}]
        optimizer = optimizer_of(self.optimizer_name, groups)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda s: 0.9**s, lambda s: 0.8**s])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Autoencoder(nn.Module):
    """Has layers of its own and is never called, only its methods are."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(Block() for _ in range(2))
        self.embed = nn.Linear(8, 16)
        self.out = nn.Linear(16, 8)

    def encode(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.encoder:
            x = block(x)
        return x

    def decode(self, x: Tensor) -> Tensor:
        return F.linear(x, self.embed.weight.T) + self.out(x)


class OtherMethod(Case):
    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__(optimizer)
        self.net = Autoencoder()

    def loss(self, x: Tensor) -> Tensor:
        return F.mse_loss(self.net.decode(self.net.encode(x)), x)


class ConfiguredModel(Case):
    """Built in `configure_model`, with weights that are made in more than one stroke and a table that is not saved."""

    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__(optimizer)
        self.model: GPT | None = None

    def configure_model(self) -> None:
        if self.model is not None:
            return
        self.model = GPT()
        for name, parameter in self.model.named_parameters():
            if name.endswith("weight") and parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.2)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, VOCABULARY) ** 2, persistent=False)
        self.drop_path = [rate.item() for rate in torch.linspace(0, 0.1, 3)]

    def loss(self, tokens: Tensor) -> Tensor:
        return next_token_loss(self.model(tokens) * self.scale, tokens)


class EncoderDecoder(Case):
    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__(optimizer)
        self.tokens = nn.Embedding(VOCABULARY, 16)
        self.transformer = nn.Transformer(16, 2, 2, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, VOCABULARY)

    def loss(self, tokens: Tensor) -> Tensor:
        embedded = self.tokens(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        return next_token_loss(
            self.head(self.transformer(embedded, embedded, tgt_mask=mask, tgt_is_causal=True)), tokens
        )


CASES: dict[str, type[L.LightningModule]] = {
    "byte_gpt": ByteGPT,
    "bare_parameter": BareParameter,
    "conv_net": ConvNet,
    "lstm": LSTMModel,
    "hf_gpt2": HuggingFaceGPT2,
    "frozen_lora": FrozenWithLoRA,
    "gan": GAN,
    "parameter_groups": ParameterGroups,
    "other_method": OtherMethod,
    "configure_model": ConfiguredModel,
    "encoder_decoder": EncoderDecoder,
    "varying_length": ByteGPT,
}
"""Name of a case -> its module."""


class AllFrozen(ByteGPT):
    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__(optimizer)
        self.requires_grad_(False)


class MetaInInit(ByteGPT):
    def __init__(self, optimizer: str = "sgd") -> None:
        with torch.device("meta"):
            super().__init__(optimizer)


REFUSED_CASES: dict[str, type[L.LightningModule]] = {"all_frozen": AllFrozen, "meta_in_init": MetaInInit}
"""Modules that no strategy can train."""

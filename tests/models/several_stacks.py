"""Models with several stacks of layers, each of which takes what comes of those before it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.cases import LENGTH, VOCABULARY, Block, Case, EncoderDecoder, next_token_loss
from tests.models.hugging_face import T5
from tests.models.stacked import WIDTH, Mixer


class Translator(EncoderDecoder):
    """Both texts are embedded before the encoder, the head shares the embedding, and the stacks differ in length."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.transformer = nn.Transformer(16, 2, 3, 2, 32, dropout=0.0, batch_first=True)
        self.head.weight = self.tokens.weight

    def loss(self, tokens: Tensor) -> Tensor:
        source, target = self.tokens(tokens.flip(1)), self.tokens(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        hidden = self.transformer(source, target, tgt_mask=mask, tgt_is_causal=True)
        return next_token_loss(self.head(hidden), tokens)


WRITING = {
    "vocab_size": VOCABULARY, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "dropout": 0.0, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2, "use_cache": False,
}  # fmt: skip


class Bart(T5):
    """Tied embeddings of encoder, decoder and head, and padding that both are to leave out."""

    def __init__(self, optimizer: str = "adamw") -> None:
        Case.__init__(self, optimizer)
        from transformers import BartConfig, BartForConditionalGeneration

        sizes = {**WRITING, "max_position_embeddings": 2 * LENGTH}
        self.model = BartForConditionalGeneration(BartConfig(**sizes, forced_eos_token_id=2))

    def loss(self, tokens: Tensor) -> Tensor:
        mask = (torch.arange(LENGTH, device=tokens.device) < 11 + tokens[:, :1] % 5).long()
        return self.model(input_ids=tokens.flip(1), attention_mask=mask, labels=tokens).loss


class Whisper(T5):
    """An encoder behind convolutions."""

    def __init__(self, optimizer: str = "adamw") -> None:
        Case.__init__(self, optimizer)
        from transformers import WhisperConfig, WhisperForConditionalGeneration

        positions = {"max_source_positions": LENGTH, "max_target_positions": LENGTH, "num_mel_bins": 4}
        self.model = WhisperForConditionalGeneration(
            WhisperConfig(**WRITING, **positions, suppress_tokens=[], begin_suppress_tokens=[])
        )

    def loss(self, tokens: Tensor) -> Tensor:
        sounds = F.one_hot(tokens, VOCABULARY)[..., :4].float().transpose(1, 2).repeat_interleave(2, 2)
        return self.model(input_features=sounds, labels=tokens).loss


class Pyramid(Case):
    """Two levels with a merge of neighbouring positions between them, as in Swin, and an own list of norms."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.high = nn.ModuleList(Block(WIDTH) for _ in range(2))
        self.norm, self.merge = nn.LayerNorm(2 * WIDTH), nn.Linear(2 * WIDTH, 2 * WIDTH, bias=False)
        self.low = nn.ModuleList(Block(2 * WIDTH) for _ in range(3))
        self.head = nn.Linear(2 * WIDTH, VOCABULARY)

    def loss(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for layer in self.high:
            x = layer(x)
        x = self.merge(self.norm(x.unflatten(1, (-1, 2)).flatten(2)))
        for layer in self.low:
            x = layer(x)
        return F.cross_entropy(self.head(x.mean(1)), tokens[:, 0])


class ClassAttention(Mixer):
    """A layer of CaiT's second stack: only the class token changes, the patches are an argument of every layer."""

    def forward(self, x: Tensor, patches: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x + F.scaled_dot_product_attention(x, patches, patches))


class CaiT(Case):
    """The second stack begins with a parameter, and is given what the first one has returned."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.patches = nn.ModuleList(Block(WIDTH) for _ in range(2))
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.classes = nn.ModuleList(ClassAttention(WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def loss(self, tokens: Tensor) -> Tensor:
        patches = self.tokens(tokens)
        for layer in self.patches:
            patches = layer(patches)
        x = self.token.expand(len(tokens), -1, -1)
        for layer in self.classes:
            x = layer(x, patches)
        return F.cross_entropy(self.head(x[:, 0]), tokens[:, 0])


class Skipping(Case):
    """Layers on the way up are given what those on the way down have returned, as in a U-Net."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.down = nn.ModuleList(Block(WIDTH) for _ in range(3))
        self.up = nn.ModuleList(Mixer(WIDTH) for _ in range(3))
        self.joins = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def loss(self, tokens: Tensor) -> Tensor:
        x, skipped = self.tokens(tokens), []
        for layer in self.down:
            x = layer(x)
            skipped.append(x)
        for layer, join in zip(self.up, self.joins, strict=True):
            x = layer(join(torch.cat([x, skipped.pop()], -1)))
        return next_token_loss(self.head(x), tokens)


class Towers(Case):
    """Two encoders that do not see each other, called in the other order, and a contrast over the whole batch."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.texts, self.images = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(VOCABULARY, WIDTH)
        self.of_texts = nn.ModuleList(Block(WIDTH) for _ in range(2))
        self.of_images = nn.ModuleList(Mixer(WIDTH) for _ in range(3))
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        image = self.images(F.one_hot(tokens, VOCABULARY).float())
        for layer in self.of_images:
            image = layer(image)
        pooled = F.normalize(image.mean(1), dim=-1)
        text = self.texts(tokens)
        for layer in self.of_texts:
            text = layer(text)
        return pooled, F.normalize(text.mean(1), dim=-1)

    def loss(self, tokens: Tensor) -> Tensor:
        image, text = self(tokens)
        logits = self.scale.exp() * text @ image.T
        return F.cross_entropy(logits, torch.arange(len(tokens), device=tokens.device))

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> dict[str, Tensor]:
        return dict(zip(("image", "text"), self(*batch), strict=True))


class Alternating(Case):
    """Two lists whose layers take turns."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(2))
        self.mixers = nn.ModuleList(Mixer(WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def loss(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block, mixer in zip(self.blocks, self.mixers, strict=True):
            x = mixer(block(x) + x)
        return next_token_loss(self.head(x), tokens)


class SkippingLater(Skipping):
    """From the third step on, layers on the way up are given what the first step has not."""

    def loss(self, tokens: Tensor) -> Tensor:
        first = x = self.tokens(tokens)
        for layer in self.down:
            x = layer(x)
        for layer, join in zip(self.up, self.joins, strict=True):
            x = layer(join(torch.cat([x, first if self.global_step > 1 else x], -1)))
        return next_token_loss(self.head(x), tokens)


class SkippingMore(Skipping):
    """Every other step computes something more between layers, also of a kind that passes layers by."""

    def loss(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        if self.global_step % 2:
            x = (x * 1.5).sin().cos() + x
        scaled = x * 0.5
        for layer in self.down:
            x = layer(x)
        for layer, join in zip(self.up, self.joins, strict=True):
            x = layer(join(torch.cat([x, scaled], -1)))
        return next_token_loss(self.head(x), tokens)


class CalledTwice(Pyramid):
    """The first stack is called twice, the second one once."""

    def loss(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for layer in [*self.high, *self.high]:
            x = layer(x)
        x = self.merge(self.norm(x.unflatten(1, (-1, 2)).flatten(2)))
        for layer in self.low:
            x = layer(x)
        return F.cross_entropy(self.head(x.mean(1)), tokens[:, 0])


SEVERAL_STACKS: dict[str, type[Case]] = {
    "translator": Translator,
    "t5": T5,
    "bart": Bart,
    "whisper": Whisper,
    "pyramid": Pyramid,
    "cait": CaiT,
    "skipping": Skipping,
    "towers": Towers,
    "alternating": Alternating,
}

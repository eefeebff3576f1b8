"""Models whose layers are arranged in other ways than in one list of one class."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.cases import VOCABULARY, Attention, Block, Case, next_token_loss

WIDTH = 16


class Mixer(nn.Module):
    """A layer without attention: a gated map of each position."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate, self.up, self.down = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Flat(Case):
    """Everything in one `nn.Sequential`: embedding, layers, norm and head."""

    def __init__(self, optimizer: str = "adamw", depth: int = 4) -> None:
        super().__init__(optimizer)
        blocks = [Block(WIDTH) for _ in range(depth)]
        self.net = nn.Sequential(
            nn.Embedding(VOCABULARY, WIDTH), *blocks, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)
        )

    def loss(self, tokens: Tensor) -> Tensor:
        return next_token_loss(self.net(tokens), tokens)


class FlatWithModules(Flat):
    """The same, with a prologue and an epilogue that have children themselves."""

    def __init__(self, optimizer: str = "adamw", depth: int = 4) -> None:
        super().__init__(optimizer)
        blocks = [Block(WIDTH) for _ in range(depth)]
        self.net = nn.Sequential(
            nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH)),
            *blocks,
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)),
        )


class Hybrid(Case):
    """Layers of two classes, one after the other."""

    def __init__(
        self, optimizer: str = "adamw", kinds: Sequence[Callable[[int], nn.Module]] = (Block, Mixer, Block, Mixer)
    ) -> None:
        super().__init__(optimizer)
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(kind(WIDTH) for kind in kinds)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def loss(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return next_token_loss(self.head(x), tokens)


class OtherBlock(Block):
    """A block of another class."""


class HybridAttention(Hybrid):
    """Layers of two classes, all of which have attention."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer, (Block, OtherBlock, Block, OtherBlock))


class FeedForward(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


def branches(number: int) -> list[nn.Module]:
    """Attention and maps of each position in turns, without norms and residuals."""
    return [FeedForward() if index % 2 else Attention(WIDTH, 2) for index in range(number)]


class Residual(nn.Module):
    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return x + residual


class ListOfLists(Case):
    """As in x-transformers: each layer is a list of a norm, a branch, and the residual."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.ModuleList([nn.LayerNorm(WIDTH), branch, Residual()]) for branch in branches(4))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def loss(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for norm, branch, residual in self.layers:
            x = residual(branch(norm(x)), x)
        return next_token_loss(self.head(x), tokens)


class PairsOfBlocks(Case):
    """A list of lists whose members are whole layers, called one after the other."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.ModuleList([Block(WIDTH), Block(WIDTH)]) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def loss(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for pair in self.layers:
            for layer in pair:
                x = layer(x)
        return next_token_loss(self.head(x), tokens)


class PairsOfBranches(PairsOfBlocks):
    """Pairs of attention and a map of each position, with residuals around them (vit-pytorch)."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.layers = nn.ModuleList(nn.ModuleList(branches(2)) for _ in range(3))

    def loss(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for attend, feed in self.layers:
            x = attend(x) + x
            x = feed(x) + x
        return next_token_loss(self.head(x), tokens)


class Repeated(Case):
    """One layer that stands several times in a list."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        block = Block(WIDTH)
        self.layers = nn.ModuleList([block] * 4)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def loss(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return next_token_loss(self.head(x), tokens)


class RepeatedPair(Repeated):
    """Two layers in turns."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.layers = nn.ModuleList([Block(WIDTH), Block(WIDTH)] * 2)
        self.layers[2], self.layers[3] = self.layers[0], self.layers[1]


class CalledAgain(Case):
    """A list of two layers that a step goes through twice."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([Block(WIDTH), Block(WIDTH)])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def loss(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for _ in range(2):
            for layer in self.layers:
                x = layer(x)
        return next_token_loss(self.head(x), tokens)


class CalledInARow(CalledAgain):
    """Each layer is called twice before the next one, as groups in Albert."""

    def loss(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(layer(x))
        return next_token_loss(self.head(x), tokens)


class TwoNames(Repeated):
    """One list under two names."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.layers = nn.ModuleList(Block(WIDTH) for _ in range(4))
        self.backbone = nn.Sequential(*self.layers)


class PartlyTwoNames(TwoNames):
    """The second name has some of the layers, and other things."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.backbone = nn.Sequential(*self.layers[:2], nn.LayerNorm(WIDTH))

    def loss(self, tokens: Tensor) -> Tensor:
        x = self.backbone(self.tokens(tokens))
        for layer in self.layers[2:]:
            x = layer(x)
        return next_token_loss(self.head(x), tokens)


class PartlyReversed(Repeated):
    """The part with other things is registered first."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        layers = [Block(WIDTH) for _ in range(4)]
        del self.layers
        self.backbone = nn.Sequential(*layers[:2])
        self.layers = nn.ModuleList(layers)


class Albert(Case):
    """Albert of Hugging Face's transformers: a list of one layer, which is called several times."""

    def __init__(self, optimizer: str = "adamw", groups: int = 1, inner: int = 1, depth: int = 4) -> None:
        super().__init__(optimizer)
        from transformers import AlbertConfig, AlbertForMaskedLM

        config = AlbertConfig(
            vocab_size=VOCABULARY, embedding_size=8, hidden_size=WIDTH, num_hidden_layers=depth, num_attention_heads=2,
            num_hidden_groups=groups, inner_group_num=inner,
            intermediate_size=32, max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
            classifier_dropout_prob=0.0,
        )  # fmt: skip
        self.model = AlbertForMaskedLM(config)

    def loss(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens, labels=tokens).loss


class AlbertGroups(Albert):
    """Two such layers in groups of two."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer, groups=2, inner=2)


class HuggingFaceHybrid(Case):
    """A model of Hugging Face's transformers with attention in some of its layers."""

    def __init__(self, optimizer: str = "adamw", name: str = "Jamba", **kwargs: Any) -> None:
        super().__init__(optimizer)
        import transformers

        config = getattr(transformers, f"{name}Config")(vocab_size=VOCABULARY, **kwargs)
        self.model = getattr(transformers, f"{name}ForCausalLM")(config)

    def loss(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens, labels=tokens, use_cache=False).loss


class Jamba(HuggingFaceHybrid):
    """Layers of two classes with one base, and experts in every second one."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(
            optimizer, "Jamba", hidden_size=WIDTH, intermediate_size=32, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, num_experts=2,
            num_experts_per_tok=1, mamba_d_state=4, mamba_dt_rank=2, use_mamba_kernels=False, pad_token_id=0,
        )  # fmt: skip


class Zamba(HuggingFaceHybrid):
    """Layers of two classes; those with attention share it."""

    def __init__(self, optimizer: str = "adamw") -> None:
        kinds = ["mamba", "hybrid", "mamba", "mamba", "hybrid", "mamba"]
        super().__init__(
            optimizer, "Zamba", hidden_size=WIDTH, intermediate_size=32, num_hidden_layers=6, num_attention_heads=4,
            num_key_value_heads=4, layers_block_type=kinds, mamba_d_state=4, n_mamba_heads=2, mamba_dt_rank=2,
            use_mamba_kernels=False, pad_token_id=0,
        )  # fmt: skip


STACKED_MODULES: dict[str, type[Case]] = {
    "flat": Flat,
    "flat_with_modules": FlatWithModules,
    "hybrid": Hybrid,
    "hybrid_attention": HybridAttention,
    "list_of_lists": ListOfLists,
    "pairs_of_blocks": PairsOfBlocks,
    "pairs_of_branches": PairsOfBranches,
    "repeated": Repeated,
    "repeated_pair": RepeatedPair,
    "called_again": CalledAgain,
    "called_in_a_row": CalledInARow,
    "two_names": TwoNames,
    "partly_two_names": PartlyTwoNames,
    "partly_reversed": PartlyReversed,
    "albert": Albert,
    "albert_groups": AlbertGroups,
    "jamba": Jamba,
    "zamba": Zamba,
}

"""Layers that do something else on one rank's part than on that of another: local message passing, then attention."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.models.cases import LENGTH, VOCABULARY, Block, Case, next_token_loss

WIDTH = 16
MARK = 100.0


class OwnError(Exception):
    """Of somebody else's package."""


class Local(Block):
    """Each node hears its neighbours by a graph that depends on the numbers; the last one is marked."""

    def is_odd(self, x: Tensor) -> bool:
        """Whether this is a part in which there is the marked node."""
        return x.shape[1] < LENGTH and bool(x.detach().amax() > MARK / 2)

    def messages(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.messages(x))


class Raises(Local):
    def messages(self, x: Tensor) -> Tensor:
        if self.is_odd(x):
            raise IndexError("an edge leads to node 15 of 8")
        return x


class RaisesItsOwn(Local):
    def messages(self, x: Tensor) -> Tensor:
        if self.is_odd(x):
            raise OwnError("an edge leads to node 15 of 8")
        return x


class RaisesBehindAttention(Local):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self.is_odd(x):
            raise IndexError("an edge leads to node 15 of 8")
        return y


class _Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, fails: bool) -> Tensor:
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if ctx.fails:
            raise IndexError("an edge leads to node 15 of 8")
        return gradients[0], None


class RaisesInBackward(Local):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Failing.apply(super().forward(x), self.is_odd(x))
        return y


class Differs(Local):
    def messages(self, x: Tensor) -> Tensor:
        return x * 1.5 if self.is_odd(x) else x


class Skips(Local):
    """No attention where there is nothing to attend to."""

    def forward(self, x: Tensor) -> Tensor:
        return x if self.is_odd(x) else super().forward(x)


class Catches(Raises):
    """It goes on without what has failed, and with what it takes to be a failure."""

    def forward(self, x: Tensor) -> Tensor:
        try:
            return super().forward(x)
        except Exception:
            return x


class Drops(Local):
    """Nodes without neighbours are left out of attention."""

    def forward(self, x: Tensor) -> Tensor:
        kept = x[:, 2:] if self.is_odd(x) else x
        y = super().forward(kept)
        return torch.cat([x[:, :2], y], 1) if self.is_odd(x) else y


class MarkedFeature(Block):
    """Features of which one rank has the marked one, where it has a half of them."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        features = self.mlp[0](self.norm2(x))
        own = features.to_local() if isinstance(features, DTensor) else features
        if own.shape[-1] < 4 * WIDTH and bool(own.detach().amax() > MARK / 2):
            raise IndexError("feature 63 of 32")
        return x + self.mlp[2](self.mlp[1](features))  # type: ignore[no-any-return]


LAYERS = {
    kind.__name__: kind
    for kind in (
        Raises, RaisesItsOwn, RaisesBehindAttention, RaisesInBackward, Differs, Skips, Catches, Drops, MarkedFeature,
    )
}  # fmt: skip


class Apart(Case):
    """Two layers of a kind."""

    def __init__(self, layer: str) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(LAYERS[layer](WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        if layer == "MarkedFeature":
            with torch.no_grad():
                self.layers[0].mlp[0].bias[-1] = MARK

    def loss(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        mark = torch.zeros(tokens.shape[1], WIDTH)
        mark[-1, 0] = MARK
        x = x + mark
        for layer in self.layers:
            x = layer(x)
        return next_token_loss(self.head(x), tokens)


class GraphLayer(nn.Module):
    """As GPSConv of PyG: messages along edges, and attention among the nodes of each graph, on `[nodes, width]`."""

    def __init__(self) -> None:
        super().__init__()
        self.local, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)

    def forward(self, x: Tensor, edges: Tensor, graph: Tensor) -> Tensor:
        source, target = edges[:, (edges < len(x)).all(0)]
        heard = torch.zeros_like(x).index_add(0, target, self.local(x)[source])
        counts = torch.bincount(graph)
        mask = torch.arange(int(counts.max())) < counts[:, None]
        padded = x.new_zeros(*mask.shape, WIDTH).masked_scatter(mask[:, :, None], x)
        attended, _ = self.attention(padded, padded, padded, key_padding_mask=~mask, need_weights=False)
        return self.norm(x + heard + attended[mask])  # type: ignore[no-any-return]


class GraphNet(L.LightningModule):
    """A batch is nodes, edges and the graph of each node."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(GraphLayer() for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        nodes, edges, graph = batch
        x = self.nodes(nodes)
        for layer in self.layers:
            x = layer(x, edges, graph)
        return self.head(x).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def graphs(sizes: list[int]) -> list[Any]:
    """One batch of graphs with so many nodes, as a loader gives it."""
    number, drawn = sum(sizes), torch.Generator().manual_seed(0)
    edges = torch.randint(0, number, (2, 2 * number), generator=drawn)
    graph = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    return [(torch.arange(number) % VOCABULARY, edges, graph)]

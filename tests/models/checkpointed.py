"""GPTs whose own code checkpoints activations: of one layer, of several, of all, and behind them."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.models.cases import ByteGPT


class EachLayer(ByteGPT):
    """A checkpoint around each layer.

    Args:
        dropout: That of the hidden states in each layer.
        use_reentrant: The kind of checkpoint.
        is_on: Whether there is one.
    """

    def __init__(self, dropout: float = 0.0, use_reentrant: bool = False, is_on: bool = True) -> None:
        super().__init__()
        self.use_reentrant, self.is_on = use_reentrant, is_on
        for block in self.model.blocks:
            block.mlp.append(nn.Dropout(dropout))

    def forward(self, tokens: Tensor) -> Tensor:
        model = self.model
        x = model.tokens(tokens)
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant) if self.is_on else block(x)
        return model.head(model.norm(x))


class AroundAll(ByteGPT):
    """Checkpoints of the embedding, of two layers and one, and of the head."""

    def forward(self, tokens: Tensor) -> Tensor:
        model = self.model

        def run(start: int, stop: int) -> Callable[[Tensor], Tensor]:
            def several(x: Tensor) -> Tensor:
                for block in model.blocks[start:stop]:
                    x = block(x)
                return x

            return several

        x = checkpoint(model.tokens, tokens, use_reentrant=False)
        x = checkpoint(run(0, 2), x, use_reentrant=False)
        x = checkpoint(run(2, 3), x, use_reentrant=False)
        return checkpoint(lambda y: model.head(model.norm(y)), x, use_reentrant=False)


class Sequentially(ByteGPT):
    """Torch's own way through a list of layers."""

    def forward(self, tokens: Tensor) -> Tensor:
        model = self.model
        x = checkpoint_sequential(list(model.blocks), 2, model.tokens(tokens), use_reentrant=False)
        return model.head(model.norm(x))

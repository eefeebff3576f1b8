"""Ranks that build other modules or optimizers than others are refused before anything is sent."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_parallel import full_state_dict
from tests.data import batches
from tests.models.cases import Block, ByteGPT
from tests.parity import TOLERANCE, largest, once, trainer_for
from tests.rank_pool import RankError

STRATEGIES = "ddp_custom", "zero1_custom", "fsdp_custom", "tp_custom", "pp_custom"


class Apart(ByteGPT):
    """Is built by its rank in some way."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, rank = kind, dist.get_rank()
        names = {"a", "b"} if rank else {"b", "a"}
        if kind == "width":
            self.model.head = nn.Linear(16, 32 + rank, bias=False)
        elif kind == "depth":
            self.model.blocks.extend(Block() for _ in range(rank))
        elif kind == "buffer":
            self.register_buffer("table", torch.zeros(3 + rank))
        elif kind == "dtype":
            self.scale = nn.Parameter(torch.ones(1, dtype=torch.float64 if rank else torch.float32))
        elif kind == "order":
            for name in sorted(names, reverse=bool(rank)):
                self.register_parameter(name, nn.Parameter(torch.ones(1)))
        elif kind == "edges":
            self.register_buffer("edges", torch.eye(3)[: 2 + rank].mT.mm(torch.eye(3)[: 2 + rank]).to_sparse())
        elif kind == "layout":
            self.register_buffer("edges", torch.eye(3).to_sparse() if rank else torch.eye(3))
        elif kind == "expanded":
            self.register_buffer("table", torch.ones(1, 3).expand(4, 3) if rank else torch.ones(4, 3))
        elif kind == "frozen":
            self.model.norm.weight.requires_grad_(not rank)

    def on_fit_start(self) -> None:
        if self.kind == "hook" and dist.get_rank():
            self.register_buffer("late", torch.zeros(3))

    def configure_optimizers(self) -> Any:
        parameters = list(self.parameters())
        first = parameters[1:] if self.kind == "left out" and dist.get_rank() else parameters
        groups = [first] if self.kind != "groups" or not dist.get_rank() else [first[:3], first[3:]]
        return torch.optim.SGD([{"params": group} for group in groups], lr=0.1)


SAID = {
    "width": r"parameter model.head.weight is \[32, 16\] float32 on rank 0, \[33, 16\] float32 on rank 1",
    "depth": r"rank 1 alone has parameter model.blocks.3.norm1.weight, .* and 8 more",
    "buffer": r"buffer table is \[3\] float32 on rank 0, \[4\] float32 on rank 1",
    "dtype": r"parameter scale is \[1\] float32 on rank 0, \[1\] float64 on rank 1",
    "order": r"another order, parameter a on rank 0 where parameter b is on rank 1",
    "frozen": r"model.norm.weight is \[16\] float32 on rank 0, \[16\] float32, frozen on rank 1",
    "hook": r"rank 1 alone has buffer late",
    "edges": r"edges is \[3, 3\] float32 of sparse_coo memory \[\[2, 2\], \[2\]\] on rank 0, .*\[\[2, 3\], \[3\]\]",
    "layout": r"buffer edges is \[3, 3\] float32 on rank 0, \[3, 3\] float32 of sparse_coo memory",
    "expanded": r"buffer table is \[4, 3\] float32 on rank 0, \[4, 3\] float32 of strided memory \[\[1, 3\]\]",
    "left out": r"optimizers of Apart differently: rank 0 alone has model.tokens.weight of optimizer 0",
    "groups": r"optimizer 0 is SGD, groups: 1 on rank 0, SGD, groups: 2 on rank 1; .* in group 1 on rank 1",
}


def fitted(strategy: str, kind: str, num_ranks: int = 2) -> None:
    trainer_for(strategy, num_ranks, max_steps=2).fit(Apart(kind), batches("byte_gpt", 2, 2))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", SAID)
def test_what_ranks_build_differently_is_named(ranks: Any, strategy: str, kind: str) -> None:
    with pytest.raises(RankError, match=SAID[kind]) as caught:
        ranks(2).run(fitted, strategy, kind)
    assert "ConfigurationError" in str(caught.value)
    assert "refused; rank 0 says why" in str(caught.value)


def test_the_first_rank_that_differs_is_named(ranks: Any) -> None:
    with pytest.raises(RankError, match="on rank 0 where parameter b is on rank 1"):
        ranks(4).run(fitted, "fsdp_custom", "order", 4)


class Cached(Block):
    """Makes its table when it is first called, on the stage that runs it."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "table"):
            self.register_buffer("table", torch.arange(float(x.shape[1])), persistent=False)
        return super().forward(x) * (1 + 0.01 * self.table[:, None]) + 0.1 * x.roll(1, -1)  # type: ignore[operator,index]


class Caching(ByteGPT):
    def __init__(self) -> None:
        super().__init__()
        self.model.blocks = nn.ModuleList(Cached() for _ in range(4))


def fitted_twice(strategy: str, num_ranks: int, readers: int) -> dict[str, Tensor]:
    L.seed_everything(3, verbose=False)
    module, loader = Caching(), batches("byte_gpt", readers, 2)
    for _ in range(2):
        trainer = trainer_for(strategy, num_ranks, num_sanity_val_steps=1)
        trainer.fit(module, loader, loader)
    return full_state_dict(trainer)


@pytest.mark.parametrize(
    ("strategy", "size", "readers"),
    [("fsdp_custom", 2, 2), ("pp_custom", 2, 1), ("fsdp_custom:pipeline=2,shard=2", 4, 2)],
)
def test_buffers_that_layers_make_when_they_are_called_differ_for_no_one(
    ranks: Any, strategy: str, size: int, readers: int
) -> None:
    weights = once(fitted_twice, "auto", 1, 1)
    ours = ranks(size).run(fitted_twice, strategy, size, readers)[0]
    assert largest((ours[name] - value).abs().max() for name, value in weights.items()) < TOLERANCE

"""A message names buffers that ranks compute from their own samples, of which those of rank 0 are kept."""

from __future__ import annotations

from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_parallel.strategies import rank_buffers
from tests.data import loader
from tests.models.cases import ByteGPT
from tests.parity import trainer_for


class Averages(ByteGPT):
    """Keeps the mean of its tokens from a step on, as a codebook keeps the mean of what it stands for.

    Args:
        begin: The step that writes it first.
        over_ranks: Whether it is the mean over all ranks.
        scale: Of what is added.
    """

    def __init__(self, begin: int = 0, over_ranks: bool = False, scale: float = 1.0) -> None:
        super().__init__()
        self.begin, self.over_ranks, self.scale = begin, over_ranks, scale
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("table", torch.arange(5.0))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.global_step >= self.begin:
            value = batch[0].float().mean() * self.scale
            self.mean.lerp_(self.all_gather(value).mean() if self.over_ranks else value, 0.1)  # type: ignore[operator]
        return super().training_step(batch, batch_idx)


class Normalized(L.LightningModule):
    """A BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0].float().mean(1, keepdim=True)).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Queue(ByteGPT):
    """Writes a few rows of a large table of unit vectors in each step, as a memory bank keeps the latest features."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bank", nn.functional.normalize(torch.randn(40_000, 16), dim=-1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        features = 0.1 * nn.functional.normalize(batch[0][:, :16].float(), dim=-1)
        self.bank[: len(features)] = features  # type: ignore[index,operator]
        return super().training_step(batch, batch_idx)


def told(name: str, kind: str, **kwargs: Any) -> list[str]:
    """What is said of buffers on this rank."""
    L.seed_everything(3, verbose=False)
    module = {"norm": Normalized, "own": Averages, "queue": Queue}[kind](**kwargs)
    said: list[str] = []
    with mock.patch.object(rank_buffers, "rank_zero_info", said.append):
        trainer_for(name, 2, max_epochs=3, limit_val_batches=0).fit(module, loader(2))
    return said


@pytest.mark.parametrize("name", ["ddp_custom", "zero1_custom", "fsdp_custom"])
@pytest.mark.parametrize("begin", [0, 3])
def test_buffers_of_own_samples_are_named(name: str, begin: int, ranks: Any) -> None:
    for said in ranks(2).run(told, name, "own", begin=begin):
        assert len(said) == 1
        assert "other values of mean, since" in said[0]
        assert "all_gather" in said[0]
        assert "sync_batchnorm" not in said[0]


def test_a_few_rows_of_a_large_buffer_are_seen(ranks: Any) -> None:
    for said in ranks(2).run(told, "ddp_custom", "queue"):
        assert len(said) == 1
        assert "other values of bank, since" in said[0]


@pytest.mark.parametrize("name", ["ddp_custom", "fsdp_custom"])
def test_statistics(name: str, ranks: Any) -> None:
    for said in ranks(2).run(told, name, "norm"):
        assert len(said) == 1
        assert "net.1.running_mean, net.1.running_var" in said[0]
        assert "sync_batchnorm" in said[0]
        assert "all_gather" not in said[0]


@pytest.mark.parametrize("kwargs", [{"over_ranks": True}, {"scale": float("nan")}])
def test_buffers_that_are_alike(kwargs: dict[str, Any], ranks: Any) -> None:
    """What is no number says nothing of samples."""
    assert ranks(2).run(told, "ddp_custom", "own", **kwargs) == [[], []]


@pytest.mark.parametrize("name", ["tp_custom", "cp_custom", "pp_custom"])
def test_ranks_that_share_samples_have_them_alike(name: str, ranks: Any) -> None:
    assert ranks(2).run(told, name, "own") == [[], []]

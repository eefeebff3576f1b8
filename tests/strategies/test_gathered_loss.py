"""A loss for which ranks meet is compared with that of one process with the samples of all of them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.nn.functional import all_gather as all_gather_with_gradients

from lightning_parallel.strategies.gathered_loss import _joined
from tests.data import batches
from tests.jobs.losses import lines
from tests.models.cases import VOCABULARY, ByteGPT
from tests.names import num_ranks, num_readers
from tests.parity import checked, largest, train_module


class Contrast(ByteGPT):
    """Tells samples apart by their mean output, among those of all ranks."""

    def gathered(self, outputs: Tensor) -> Tensor:
        return self.all_gather(outputs, sync_grads=True).flatten(0, -2)

    def loss(self, tokens: Tensor) -> Tensor:
        outputs = F.normalize(self.model(tokens).mean(1), dim=-1)
        outputs = self.gathered(outputs) if self.trainer.world_size > 1 else outputs
        return F.cross_entropy(8 * outputs @ outputs.T, torch.arange(len(outputs)))


class ByTorch(Contrast):
    """The same with torch's own gather."""

    def gathered(self, outputs: Tensor) -> Tensor:
        return torch.cat(all_gather_with_gradients(outputs)) if dist.is_initialized() else outputs


class OwnRows(Contrast):
    """Each rank has the loss of its own samples, against those of all."""

    def loss(self, tokens: Tensor) -> Tensor:
        own = F.normalize(self.model(tokens).mean(1), dim=-1)
        outputs = self.gathered(own) if self.trainer.world_size > 1 else own
        return F.cross_entropy(8 * own @ outputs.T, torch.arange(len(own)) + len(own) * self.global_rank)


class WithoutGradients(Contrast):
    """The gather of others brings no gradient back, as in many a public repository."""

    def gathered(self, outputs: Tensor) -> Tensor:
        found = [torch.empty_like(outputs) for _ in range(dist.get_world_size())]
        dist.all_gather(found, outputs.contiguous())
        found[dist.get_rank()] = outputs
        return torch.cat(found)


class OwnRowsWithoutGradients(OwnRows):
    """Here, not only the length of the gradient is another one."""

    def gathered(self, outputs: Tensor) -> Tensor:
        return self.all_gather(outputs).flatten(0, -2)


class NormalizedFirst(Contrast):
    """A statistic of the samples of the rank, where one process has one of all samples."""

    def loss(self, tokens: Tensor) -> Tensor:
        own = self.model(tokens).mean(1)
        own = (own - own.mean(0)) / (own.std(0) + 1e-3)
        outputs = self.gathered(own) if self.trainer.world_size > 1 else own
        return F.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))


class NormalizedInTraining(NormalizedFirst):
    """The same, in training alone."""

    def loss(self, tokens: Tensor) -> Tensor:
        if not self.training:
            raise NotImplementedError
        return super().loss(tokens)


class CountsRanks(Contrast):
    """A mean over the samples of all ranks by their number."""

    def loss(self, tokens: Tensor) -> Tensor:
        outputs = self.model(tokens).mean(1)
        return self.gathered(outputs).square().sum() / (len(outputs) * self.trainer.world_size)


class KnowsItsRank(Contrast):
    """Keeps which rank it is, so that it cannot be run as one process."""

    def on_train_start(self) -> None:
        self.number = torch.tensor(self.global_rank)

    def loss(self, tokens: Tensor) -> Tensor:
        own = F.normalize(self.model(tokens).mean(1), dim=-1)
        return F.cross_entropy(8 * own @ self.gathered(own).T, torch.arange(len(own)) + len(own) * self.number)


class OfOneGroup(Contrast):
    """Meets other ranks in a group that it asks for."""

    def gathered(self, outputs: Tensor) -> Tensor:
        group = self.trainer.strategy.data_group  # type: ignore[attr-defined]
        found = [torch.empty_like(outputs) for _ in range(group.size())]
        dist.all_gather(found, outputs.contiguous(), group=group)
        return torch.cat(found)

    def loss(self, tokens: Tensor) -> Tensor:
        outputs = F.normalize(self.model(tokens).mean(1), dim=-1)
        return 0.1 * outputs.square().mean() + self.gathered(outputs).square().sum()


class WithTeacher(ByteGPT):
    """A teacher follows in each step, before it is asked, and the ranks meet for the mean of what it says.

    Args:
        optimizer: Its optimizer.
        by_data: Whether it is written through ``.data``, which counts no write.
    """

    def __init__(self, optimizer: str = "sgd", by_data: bool = True) -> None:
        super().__init__(optimizer)
        self.teacher = copy.deepcopy(self.model).requires_grad_(False)
        with torch.no_grad():
            for parameter in self.teacher.parameters():
                parameter.mul_(0.5)
        self.by_data = by_data
        self.register_buffer("center", torch.zeros(VOCABULARY))

    def follow(self) -> None:
        for own, following in zip(self.model.parameters(), self.teacher.parameters(), strict=True):
            if self.by_data:
                following.data = 0.8 * following.data + 0.2 * own.data
            else:
                following.data.lerp_(own.data, 0.2)

    def loss(self, tokens: Tensor) -> Tensor:
        self.follow()
        with torch.no_grad():
            said = self.teacher(tokens)
            center = said.mean((0, 1))
            if dist.is_initialized() and dist.get_world_size() > 1:
                dist.all_reduce(center)
                center /= dist.get_world_size()
        loss = (self.model(tokens) - said + self.center).square().mean()
        self.center.data = 0.9 * self.center + 0.1 * center  # type: ignore[operator]
        return loss


class TeacherWithoutMeeting(WithTeacher):
    """The same, without other ranks."""

    def loss(self, tokens: Tensor) -> Tensor:
        self.follow()
        return (self.model(tokens) - self.teacher(tokens).detach()).square().mean()


class OfOtherLengths(Contrast):
    """Texts are as long as the longest one of the rank's batch, as a collate function pads them."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0][:, : 12 + self.global_rank]]


class WithoutPickle(Contrast):
    """A batch holds something that no other rank can be sent."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [*batch, {"weigh": lambda value: value}]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch[:1], batch_idx)


LOSS, LENGTH, DIRECTION = "is not that of one process", "is 0.5 times that of one process", "of its norm"


def told(make: Any, name: str, **kwargs: Any) -> list[str]:
    size = num_ranks(name)
    with lines() as found:
        train_module(make, batches("byte_gpt", num_readers(name, size), 2), checked(name), size, **kwargs)
    return found


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (WithoutGradients, LENGTH),
        (OwnRowsWithoutGradients, DIRECTION),
        (NormalizedFirst, LOSS),
        (NormalizedInTraining, LOSS),
    ],
)
@pytest.mark.parametrize("name", ["ddp_custom", "fsdp_custom"])
def test_what_differs_is_told_once(ranks: Any, make: Any, words: str, name: str) -> None:
    first, *others = ranks(2).run(told, make, name)
    assert len(first) == 1
    assert words in first[0]
    assert "2 ranks meet" in first[0]
    assert not any(others)


@pytest.mark.parametrize(
    "make",
    [
        Contrast,
        ByTorch,
        OwnRows,
        CountsRanks,
        KnowsItsRank,
        OfOneGroup,
        WithTeacher,
        TeacherWithoutMeeting,
        OfOtherLengths,
        WithoutPickle,
    ],
)
@pytest.mark.parametrize("name", ["ddp_custom", "fsdp_custom"])
def test_nothing_is_told_of_what_is_equal_or_cannot_be_seen(ranks: Any, make: Any, name: str) -> None:
    assert not any(ranks(2).run(told, make, name))


def test_ranks_that_share_samples_count_once(ranks: Any) -> None:
    assert not any(ranks(4).run(told, Contrast, "fsdp_tp_custom"))
    first, *others = ranks(4).run(told, NormalizedFirst, "fsdp_tp_custom")
    assert len(first) == 1
    assert "2 ranks meet" in first[0]
    assert not any(others)


def final(make: Any, strategy: str, num_ranks: int) -> dict[str, Tensor]:
    return train_module(make, batches("byte_gpt", num_ranks, 3), strategy, num_ranks).final


@pytest.mark.parametrize(("make", "is_equal"), [(Contrast, True), (OwnRows, True), (OwnRowsWithoutGradients, False)])
def test_what_is_told_is_so(ranks: Any, make: Any, is_equal: bool) -> None:
    ours, theirs = ranks(2).run(final, make, "ddp_custom", 2)[0], final(make, "auto", 1)
    difference = largest(float((ours[name] - each).abs().max()) for name, each in theirs.items())
    assert (difference < 1e-5) == is_equal


def nothing_left(make: Any) -> dict[str, Tensor]:
    return train_module(make, batches("byte_gpt", 2, 3), checked("ddp_custom"), 2).final


def test_looking_changes_nothing(ranks: Any) -> None:
    unchecked = ranks(2).run(final, WithoutGradients, "ddp_custom", 2)[0]
    looked_at = ranks(2).run(nothing_left, WithoutGradients)[0]
    assert all(torch.equal(each, looked_at[name]) for name, each in unchecked.items())


def test_batches_are_joined_as_they_are_cut() -> None:
    first = {"a": torch.zeros(2, 3), "b": ["x", "y"], "c": (torch.ones(()), None), "d": [torch.ones(2), "same"]}
    second = {"a": torch.ones(2, 3), "b": ["z", "w"], "c": (torch.ones(()), None), "d": [torch.zeros(2), "same"]}
    joined = _joined([first, second], 2)
    assert joined["a"].tolist() == [[0.0] * 3, [0.0] * 3, [1.0] * 3, [1.0] * 3]
    assert joined["b"] == ["x", "y", "z", "w"]
    assert joined["c"][1] is None
    assert joined["d"][0].tolist() == [1.0, 1.0, 0.0, 0.0]
    with pytest.raises(ValueError, match="other values"):
        _joined([{"scale": 1.0}, {"scale": 2.0}], 2)

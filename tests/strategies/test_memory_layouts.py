"""Buffers that are sparse, of eight or sixteen bits, or whose elements share memory, and samples that are sparse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, default_collate

from lightning_parallel import _torch, full_state_dict
from tests.data import GLOBAL_BATCH, batches, data_of
from tests.models.cases import Block, ByteGPT
from tests.models.memory_layouts import Layouts, SparseSamples
from tests.parity import TOLERANCE, checked, largest, once, trainer_for
from tests.rank_pool import RankError

STRATEGIES = [
    ("ddp_custom", 2, 2),
    ("zero1_custom", 2, 2),
    ("fsdp_custom", 2, 2),
    ("tp_custom", 2, 1),
    ("cp_custom", 2, 1),
    ("pp_custom", 2, 1),
    ("pp_custom:schedule=turns", 2, 1),
    ("fsdp_custom:pipeline=2,shard=2", 4, 2),
]


def _numbers(values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: (value if value.layout is torch.strided else value.to_dense()).float() for name, value in values.items()
    }


def resumed(strategy: str, num_ranks: int, readers: int, file: str) -> tuple[dict[str, Tensor], list[float]]:
    """The weights after an epoch and another one from its checkpoint, and what one buffer has counted."""
    counted: list[float] = []
    for epochs in (1, 2):
        L.seed_everything(3, verbose=False)
        module = Layouts()
        trainer = trainer_for(strategy, num_ranks, max_epochs=epochs)
        loader = batches("byte_gpt", readers, 2)
        trainer.fit(module, loader, loader, ckpt_path=file if epochs == 2 else None)
        counted += [module.steps.sum().item(), module.model.blocks[-1].steps.sum().item()]
        if epochs == 1:
            trainer.save_checkpoint(file)
    return _numbers(full_state_dict(trainer)), counted


@pytest.mark.parametrize(("strategy", "size", "readers"), STRATEGIES)
def test_tensors_of_any_layout_are_trained_with(
    ranks: Any, tmp_path: Path, strategy: str, size: int, readers: int
) -> None:
    weights, counted = once(resumed, "auto", 1, 1, str(tmp_path / "one.ckpt"))
    name = checked(f"{strategy}{',' if ':' in strategy else ':'}checkpoint=whole")
    found = ranks(size).run(resumed, name, size, readers, str(tmp_path / "many.ckpt"))
    ours = found[0][0]
    assert list(ours) == list(weights)
    assert largest((ours[entry] - value).abs().max() for entry, value in weights.items()) < TOLERANCE
    for _, seen in found:
        assert seen == counted


def begun_apart(strategy: str) -> list[list[float]]:
    """What one rank alone has written before the fit, behind it."""
    module = Layouts()
    written = (module.table[0], module.scales, module.edges.values(), module.frozen.data)
    for each in written:
        each[0] = dist.get_rank() + 1.0
    trainer_for(strategy, 2, max_steps=1).fit(module, batches("byte_gpt", 2, 1))
    return [each.float().tolist() for each in written]


@pytest.mark.parametrize("strategy", ["ddp_custom", "zero1_custom", "fsdp_custom"])
def test_ranks_begin_with_the_values_of_the_first_one(ranks: Any, strategy: str) -> None:
    first, second = ranks(2).run(begun_apart, strategy)
    assert first == second
    assert [each[0] for each in first] == [1.0] * 4


def refused(strategy: str) -> None:
    trainer_for(strategy, 2).fit(Layouts(), batches("byte_gpt", 2, 2))


@pytest.mark.parametrize("strategy", ["ddp_custom", "fsdp_custom"])
def test_folders_for_sparse_buffers_are_refused_before_training(ranks: Any, strategy: str) -> None:
    with pytest.raises(
        RankError, match=r"have no sparse tensors: edges, rows, .* of Layouts are sparse; register them"
    ):
        ranks(2).run(refused, f"{strategy}:checkpoint=sharded")


def _collated(form: torch.layout, samples: Any) -> tuple[Tensor, Tensor]:
    tokens = default_collate(samples)[0]
    return tokens, tokens[:, :4].clamp(max=1).float().to_sparse(layout=form)


class _Collate:
    def __init__(self, form: torch.layout) -> None:
        self.form = form

    def __call__(self, samples: Any) -> tuple[Tensor, Tensor]:
        return _collated(self.form, samples)


def with_sparse_samples(strategy: str, num_ranks: int, readers: int, form: torch.layout) -> dict[str, Tensor]:
    L.seed_everything(3, verbose=False)
    samples: Dataset[Any] = data_of("byte_gpt", 3 * GLOBAL_BATCH, GLOBAL_BATCH)
    loader: Any = DataLoader(samples, batch_size=GLOBAL_BATCH // readers, collate_fn=_Collate(form))
    trainer = trainer_for(strategy, num_ranks)
    trainer.fit(SparseSamples(), loader)
    return full_state_dict(trainer)


@pytest.mark.parametrize("form", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.parametrize(
    ("strategy", "readers"), [("ddp_custom", 2), ("fsdp_custom", 2), ("tp_custom", 1), ("pp_custom", 1)]
)
def test_sparse_samples_are_shared_out(ranks: Any, strategy: str, readers: int, form: torch.layout) -> None:
    weights = once(with_sparse_samples, "auto", 1, 1, form)
    ours = ranks(2).run(with_sparse_samples, checked(strategy), 2, readers, form)[0]
    assert largest((ours[name] - value).abs().max() for name, value in weights.items()) < TOLERANCE


class Replaces(ByteGPT):
    """Layers count in sparse buffers, and one on the last stage puts others in the place of those of the module."""

    def __init__(self) -> None:
        super().__init__()
        self.model.blocks = nn.ModuleList(Counts() for _ in range(4))
        self.holder = nn.Module()
        self.holder.register_buffer("table", torch.zeros(1).expand(3))
        self.holder.register_buffer("rows", torch.eye(3).to_sparse_csr())
        self.holder.register_buffer("blocks", torch.eye(4).to_sparse_bsr((2, 2)))
        self.model.blocks[3].held = [self.holder]


class Counts(Block):
    held: Any = ()

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(2, 2).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls = (self.calls + torch.eye(2).to_sparse()).coalesce()
            for holder in self.held:
                holder.table = torch.arange(3.0) + 1
                holder.rows = torch.ones(3, 3).to_sparse_csr()
        return super().forward(x)


def replaced(strategy: str, num_ranks: int, readers: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    L.seed_everything(3, verbose=False)
    module = Replaces()
    trainer = trainer_for(strategy, num_ranks)
    trainer.fit(module, batches("byte_gpt", readers, 3))
    return _numbers(full_state_dict(trainer)), _numbers(dict(module.named_buffers()))


@pytest.mark.parametrize("strategy", ["fsdp_custom", "pp_custom", "pp_custom:schedule=turns"])
def test_buffers_of_another_layout_take_the_place_of_others(ranks: Any, strategy: str) -> None:
    readers = 2 if strategy == "fsdp_custom" else 1
    weights, buffers = once(replaced, "auto", 1, 1)
    found = ranks(2).run(replaced, checked(strategy), 2, readers)
    assert largest((found[0][0][name] - value).abs().max() for name, value in weights.items()) < TOLERANCE
    for _, ours in found:
        assert largest((ours[name] - value).abs().max() for name, value in buffers.items()) < TOLERANCE


def sent_apart(values: int) -> Any:
    edges = torch.eye(4)[: values + dist.get_rank()].to_sparse()
    _torch.groups.broadcast_tensors([edges], source=0)
    return edges.to_dense()


def test_sparse_tensors_of_other_sizes_are_not_received(ranks: Any) -> None:
    with pytest.raises(RankError, match=r"in sparse buffers than others, with their indices 6 and 9, and"):
        ranks(2).run(sent_apart, 2)


def sent_alone() -> list[Tensor]:
    rank = dist.get_rank() + 1.0
    ones = torch.ones(4) * rank
    tensors = [(ones.to_sparse() + ones.to_sparse()).coalesce(), (torch.arange(4.0) * rank)[:, None].t()]
    for tensor in tensors:
        _torch.groups.broadcast_tensors([tensor], source=0)
    return [tensor.to_dense() for tensor in tensors]


def test_a_tensor_of_odd_strides_is_sent_alone(ranks: Any) -> None:
    for edges, row in ranks(2).run(sent_alone):
        assert edges.tolist() == [2.0] * 4
        assert row.tolist() == [[0.0, 1.0, 2.0, 3.0]]


class Writes(Layouts):
    """Each rank writes numbers of its own into buffers, which the next step begins with those of the first rank."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        buffers: list[Any] = [self.table, self.scales, self.codes]
        self.seen.append([float(each.view(-1)[0] if each.ndim == 1 else each[0, 0]) for each in buffers])
        loss = super().training_step(batch, batch_idx)
        for each in buffers:
            each.data.select(0, 0).view(-1)[:1].fill_(dist.get_rank() + 1)
        return loss


def written(strategy: str) -> list[list[float]]:
    module = Writes()
    trainer_for(strategy, 2).fit(module, batches("byte_gpt", 2, 3))
    return module.seen


@pytest.mark.parametrize("strategy", ["ddp_custom", "fsdp_custom"])
def test_steps_begin_with_the_buffers_of_the_first_rank(ranks: Any, strategy: str) -> None:
    for seen in ranks(2).run(written, strategy):
        assert seen == [[0.0] * 3, [1.0] * 3, [1.0] * 3]

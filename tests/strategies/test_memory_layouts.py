"""Buffers that are sparse, of eight or sixteen bits, or whose elements share memory, and samples that are sparse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from lightning_parallel import full_state_dict
from tests.data import GLOBAL_BATCH, batches, data_of
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

"""A Trainer and a strategy before `fit`, and checkpoints that lack states: as under Lightning's DDP."""

from __future__ import annotations

import logging
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_parallel import full_state_dict
from lightning_parallel.presets import PRESETS
from lightning_parallel.ranks.degrees import Degrees
from lightning_parallel.ranks.mesh import build_mesh, data_rank_of
from tests.data import loader
from tests.models.cases import ByteGPT, Case
from tests.names import num_ranks, num_readers
from tests.parity import TOLERANCE, difference, trainer_for

# States of optimizers -------------------------------------------------------------------------------------------------


class EmptiesOnSave(ByteGPT):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["optimizer_states"] = []


class EmptiesOnLoad(ByteGPT):
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["optimizer_states"] = []


def resumed(kind: type[Case], strategy: str, num_ranks: int, path: str) -> dict[str, Tensor]:
    """Fit, save, and go on from the file with new moments."""
    L.seed_everything(3, verbose=False)
    trainer = trainer_for(strategy, num_ranks)
    trainer.fit(kind("adamw"), loader(num_ranks, 2))
    trainer.save_checkpoint(path)
    trainer.strategy.barrier()
    trainer = trainer_for(strategy, num_ranks, max_epochs=2)
    trainer.fit(kind("adamw"), loader(num_ranks, 2), ckpt_path=path)
    return full_state_dict(trainer)


@pytest.mark.parametrize("kind", [EmptiesOnSave, EmptiesOnLoad])
@pytest.mark.parametrize("name", ["fsdp_custom", "zero1_custom"])
def test_resume_without_states_of_optimizers(ranks: Any, tmp_path: Any, kind: type[Case], name: str) -> None:
    expected = resumed(kind, "auto", 1, str(tmp_path / "expected.ckpt"))
    assert difference(ranks(2).run(resumed, kind, name, 2, str(tmp_path / "ours.ckpt"))[0], expected) <= TOLERANCE


class TwoOptimizers(L.LightningModule):
    """Its second optimizer came later, or has gone."""

    def __init__(self, number: int = 2) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.nets = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
        self.number = number

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizers = self.optimizers()
        for net, optimizer in zip(self.nets, optimizers if self.number > 1 else [optimizers], strict=False):
            optimizer.zero_grad()
            self.manual_backward(net(batch).pow(2).mean())
            optimizer.step()

    def train_dataloader(self) -> Any:
        return DataLoader(torch.ones(4, 2), batch_size=2)  # type: ignore[arg-type]

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(net.parameters()) for net in list(self.nets)[: self.number]], []


@pytest.mark.parametrize(
    ("before", "after", "words"), [(1, 2, "2; without a state: Adam"), (2, 1, "1; those beyond are not used")]
)
@pytest.mark.parametrize("name", ["dp_custom", "ddp_custom", "zero1_custom", "fsdp_custom"])
def test_other_numbers_of_optimizers_are_told(
    name: str, before: int, after: int, words: str, tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = trainer_for(name, 1)
    trainer.fit(TwoOptimizers(before))
    trainer.save_checkpoint(path := tmp_path / "first.ckpt")
    again = trainer_for(name, 1, max_epochs=2)
    with caplog.at_level(logging.INFO):
        again.fit(TwoOptimizers(after), ckpt_path=path)
    assert [words in record.getMessage() for record in caplog.records].count(True) == 1
    assert [len(optimizer.state) for optimizer in again.optimizers] == [2] * after


class SavesItself(ByteGPT):
    def on_train_epoch_end(self) -> None:
        self.trainer.save_checkpoint("never.ckpt")


def saved_with_a_mock(strategy: str, num_ranks: int) -> list[Any]:
    """What `torch.save` is given where a test has replaced it."""
    trainer = trainer_for(strategy, num_ranks)
    with mock.patch("torch.save") as save:
        trainer.fit(SavesItself(), loader(num_ranks, 2))
    return [call.args[0]["lightning_parallel"] for call in save.call_args_list]


@pytest.mark.parametrize("name", ["ddp_custom", "fsdp_custom"])
def test_random_states_travel_where_a_test_saves_nothing(ranks: Any, name: str) -> None:
    (saved,), nothing = ranks(2).run(saved_with_a_mock, name, 2)
    assert not nothing
    assert len(saved["states"]) == 2
    for shared, own in saved["states"]:
        assert torch.equal(shared["host"], saved["states"][0][0]["host"])
        assert not torch.equal(shared["host"], own["host"])
        assert isinstance(own["numpy"][1], Tensor)


# Before a fit ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["auto", *PRESETS])
def test_a_module_that_is_only_connected_is_saved_and_loaded(name: str, tmp_path: Any) -> None:
    trainer, module = trainer_for(name, 1), ByteGPT("adamw")
    trainer.strategy.connect(module)
    trainer.save_checkpoint(path := tmp_path / "before.ckpt")
    loaded = trainer_for(name, 1).strategy.load_checkpoint(path)
    assert difference(dict(loaded["state_dict"]), dict(module.state_dict())) == 0
    other = trainer_for(name, 1)
    other.strategy.connect(fresh := ByteGPT("adamw"))
    other.strategy.load_model_state_dict(other.strategy.load_checkpoint(path))
    assert difference(dict(fresh.state_dict()), dict(module.state_dict())) == 0
    trainer.fit(module, loader(1, 1))  # as if nothing had been


@pytest.mark.parametrize("name", ["auto", *PRESETS])
def test_a_strategy_without_a_module_saves_and_loads(name: str, tmp_path: Any) -> None:
    strategy = trainer_for(name, 1).strategy
    strategy.save_checkpoint({"found": torch.ones(2)}, path := tmp_path / "values.ckpt")
    assert torch.equal(strategy.load_checkpoint(path)["found"], torch.ones(2))


def asked_before_fit(strategy: str, num_ranks: int) -> tuple[dict[str, int], float, list[float]]:
    """What a strategy answers before a fit, in processes that have a group already; and what it says in one."""
    trainer = trainer_for(strategy, num_ranks)
    trainer.strategy.cluster_environment.set_global_rank(rank := dist.get_rank())  # type: ignore[attr-defined]
    share = 2.0 if rank else 1.0
    found = (
        dict(trainer.distributed_sampler_kwargs or {}),
        float(trainer.strategy.reduce(torch.tensor(share), reduce_op="sum")),
        trainer.strategy.all_gather(torch.tensor(share)).flatten().tolist(),
    )
    trainer.fit(ByteGPT(), loader(num_readers(strategy, num_ranks), 1))
    assert trainer.distributed_sampler_kwargs == found[0]
    return found


def means(strategy: str, num_ranks: int) -> list[complex]:
    """Means over ranks of 1 and 2, of each kind of number."""
    trainer = trainer_for(strategy, num_ranks)
    trainer.strategy.cluster_environment.set_global_rank(rank := dist.get_rank())  # type: ignore[attr-defined]
    own = (torch.tensor(1 + rank), torch.tensor(1.0 + rank), torch.tensor((1 + rank) * 1j))
    return [complex(trainer.strategy.reduce(each, reduce_op="mean")) for each in own]


def test_means_are_not_truncated(ranks: Any) -> None:
    for found in ranks(2).run(means, "ddp_custom", 2):
        assert found == [1.5, 1.5, 1.5j]


@pytest.mark.parametrize("name", ["ddp_custom", "fsdp_custom", "tp_custom"])
def test_a_strategy_answers_before_a_fit(ranks: Any, name: str) -> None:
    found = ranks(2).run(asked_before_fit, name, 2)
    readers = num_readers(name, num_ranks(name))
    expected = (3.0, [1.0, 2.0]) if readers == 2 else (1.0, [1.0])
    assert found[0] == ({"num_replicas": readers, "rank": 0}, *expected)
    assert found[1][0] == {"num_replicas": readers, "rank": readers - 1}


@pytest.mark.parametrize("name", list(PRESETS))
def test_without_a_group_values_are_those_of_this_process(name: str) -> None:
    strategy = trainer_for(name, 1).strategy
    assert strategy.reduce(torch.tensor(2.0)) == strategy.all_gather(torch.tensor(2.0)) == 2
    assert not dist.is_initialized()


DEGREES = [{"tensor": 2}, {"pipeline": 2}, {"context": 2, "replicate": 2}, {"pipeline": 2, "tensor": 2}]


def data_ranks(given: dict[str, Any], innermost: str) -> tuple[int, int]:
    degrees = Degrees(**given).resolve(4)
    mesh = build_mesh(degrees, "cpu", innermost=innermost)
    return data_rank_of(dist.get_rank(), degrees, innermost=innermost), mesh.data_rank


@pytest.mark.parametrize("given", DEGREES, ids=str)
@pytest.mark.parametrize("innermost", ["tensor", "pipeline"])
def test_the_place_of_a_reader_is_that_of_the_mesh(ranks: Any, given: dict[str, int], innermost: str) -> None:
    for computed, of_mesh in ranks(4).run(data_ranks, given, innermost):
        assert computed == of_mesh

"""Which parameters are sharded, in which units, and the collectives of a step."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_parallel.ranks.dtensors import local_of
from lightning_parallel.techniques import sharding
from lightning_parallel.techniques.sharding import apply_sharding, keep_whole, plan_sharding, unreduced_parameters
from tests.collectives import collectives_of_a_window
from tests.data import loader
from tests.models.cases import CASES, GPT, ByteGPT
from tests.parity import trainer_for


def test_plan_under_automatic_optimization() -> None:
    module = CASES["bare_parameter"]()
    plan = plan_sharding(module, ("model.blocks.0", "model.blocks.1"), root_is_unit=True)
    assert plan.units == ("model.blocks.0", "model.blocks.1", "")
    assert plan.whole == {"temperature": "a scalar"}


def test_plan_under_manual_optimization() -> None:
    plan = plan_sharding(CASES["gan"](), (), root_is_unit=False)
    assert plan.units == ("discriminator", "generator")
    assert plan.whole == {"shift": "no unit holds it"}


def test_parameters_of_another_dtype_stay_whole() -> None:
    module = GPT()
    module.norm.to(torch.float64)
    plan = plan_sharding(module, (), root_is_unit=True)
    assert set(plan.whole) == {"norm.weight", "norm.bias"}


def test_the_audit_names_forgotten_parameters() -> None:
    module = CASES["byte_gpt"]()
    plan = plan_sharding(module, (), root_is_unit=True)
    forgotten = unreduced_parameters(module, plan, None)  # type: ignore[arg-type]
    assert forgotten == [name for name, _ in module.named_parameters()]


@pytest.mark.parametrize(
    ("strategy", "size", "gathers", "reduces", "all_reduces"),
    [
        # Three layers and the root: layers are gathered twice, the root is kept from forward to backward.
        # The all-reduce is that of a byte a parameter, by which ranks agree on what the step used.
        ("fsdp_custom", 2, 7, 4, 1),
        ("zero2_custom", 2, 4, 4, 1),
        ("hsdp_custom", 4, 7, 4, 4 + 1),
    ],
)
def test_collectives_of_a_step(
    ranks: Any, strategy: str, size: int, gathers: int, reduces: int, all_reduces: int
) -> None:
    counts = ranks(size).run(collectives_of_a_window, strategy)[0]
    assert counts.number("gather") == gathers, counts
    assert counts.number("reduce_scatter") == reduces, counts
    assert counts.number("all_reduce") == all_reduces, counts


class Gathers(TorchDispatchMode):
    """Over how many ranks each gather goes."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if func.namespace == "c10d" and ("allgather" in name or "all_gather" in name):
            whole, part, *_ = [leaf.numel() for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
            self.sizes.append(whole // part)
        return func(*args, **(kwargs or {}))


def sizes_of_gathers(strategy: str) -> list[int]:
    mode = Gathers()

    class Module(ByteGPT):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                mode.__enter__()

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            if self.trainer.global_step == 1:
                mode.__exit__(None, None, None)

    trainer_for(strategy, 4).fit(Module(), loader(4, 3))
    return mode.sizes


@pytest.mark.parametrize(
    ("reshard", "sizes"), [("2", [4] * 4 + [2] * 3), ("always", [4] * 7), ("never", [4] * 4), ("1", [4] * 4)]
)
def test_gathers_of_backward_go_over_as_many_ranks_as_given(ranks: Any, reshard: str, sizes: list[int]) -> None:
    """The root and three layers in forward; in backward, the layers from the ranks over which they stay gathered."""
    for found in ranks(4).run(sizes_of_gathers, f"fsdp_custom:reshard={reshard}"):
        assert found == sizes


def bytes_at_units(strategy: str, num_ranks: int) -> tuple[list[int], list[int]]:
    """Bytes of whole parameters that are there before each unit is sharded, and those that should be."""
    module = ByteGPT()
    memory: dict[StorageWeakRef, int] = {}
    found, sharded = [], []

    def watched(unit: nn.Module, **options: Any) -> Any:
        def storages(of: nn.Module) -> dict[StorageWeakRef, int]:
            whole = [local_of(p).untyped_storage() for p in of.parameters()]
            return {StorageWeakRef(storage): len(storage) for storage in whole}

        memory.update(storages(module) if not memory else {})
        found.append(sum(size for reference, size in memory.items() if not reference.expired()))
        own = storages(unit)
        sharded.append(sum(size for reference, size in memory.items() if reference in own))
        return fully_shard(unit, **options)

    with mock.patch.object(sharding, "fully_shard", watched):
        trainer_for(strategy, num_ranks, max_steps=1).fit(module, loader(num_ranks, 1))
    return found, [sum(sharded[index:]) for index in range(len(sharded))]


@pytest.mark.parametrize(("strategy", "size"), [("fsdp_custom", 2), ("fsdp_tp_custom", 4)])
def test_whole_parameters_of_a_unit_are_freed_before_the_next_one_is_sharded(
    ranks: Any, strategy: str, size: int
) -> None:
    """They were moved to the device to be sharded, and a snapshot still refers to them."""
    for found, expected in ranks(size).run(bytes_at_units, strategy, size):
        assert len(found) == 4
        assert found == expected


# Without units ----------------------------------------------------------------------------------------------------


def test_parameters_and_buffers_go_to_the_device_without_units() -> None:
    module = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4))
    plan = keep_whole(module)
    assert plan.units == ()
    assert set(plan.whole) == {name for name, _ in module.named_parameters()}
    moved: list[Tensor] = []
    options: Any = {"reshard": "always", "policy": None, "offload": None, "device": torch.device("cpu")}
    with mock.patch.object(Tensor, "to", lambda self, device: moved.append(self) or self):
        apply_sharding(module, plan, Any, **options)
    assert len(moved) == 4 + 3

"""Which parameters are sharded, in which units, and the collectives of a step."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from lightning_parallel.techniques.sharding import apply_sharding, keep_whole, plan_sharding, unreduced_parameters
from tests.collectives import collectives_of_a_window
from tests.models.cases import CASES, GPT


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

"""Linear maps in float8, and which cannot be."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_parallel import ConfigurationError, build_strategy
from lightning_parallel.techniques.float8 import RECIPES, PartProducts, apply_float8, unfitting_violations
from tests.collectives import Collectives
from tests.data import loader
from tests.models.cases import CASES
from tests.parity import TOLERANCE, largest, make_trainer, once, reference, train, worst

FLIP = 1e-4
"""An element between two float8 numbers may fall to the other side; without float8, the model differs by 2e-3."""


def test_float8_needs_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"lightning_parallel\[float8\]"):
        make_trainer(build_strategy("fsdp_custom:float8=rowwise:emulate"), 2)


def test_float8_needs_maps_that_fit() -> None:
    assert unfitting_violations([nn.Linear(8, 24), nn.Linear(16, 32)], "tensorwise") == []
    assert "multiples of 16 (8 x 24)" in unfitting_violations([nn.Linear(8, 24)], "tensorwise")[0]
    with pytest.raises(ConfigurationError, match="0 linear maps"):  # Hugging Face's GPT-2 has Conv1D
        make_trainer(build_strategy("ddp_custom:float8=tensorwise:emulate"), 2).fit(CASES["hf_gpt2"](), loader(1, 1))


def errors_of_parts(float8: str, by_columns: bool, features: tuple[int, int]) -> list[float]:
    """Differences of results and gradients from torchao's map, relative to the largest element; 32-bit sums."""
    torch.manual_seed(0)
    group = dist.group.WORLD
    assert group is not None
    whole = nn.Linear(*features)
    states = (torch.randn(3, 8, features[0]) * torch.arange(1, features[0] + 1)).requires_grad_()
    wave = torch.randn(3, 8, features[1]) * torch.arange(features[1], 0, -1)
    product = PartProducts(float8, group).of(whole, by_columns=by_columns)
    assert product is not None
    holder = nn.Sequential(whole)
    apply_float8([holder], float8)
    expected = holder(states) - whole.bias
    of_states, of_weight = torch.autograd.grad(expected, [states, holder[0].weight], wave)
    dim, size, rank = 0 if by_columns else 1, group.size(), group.rank()
    weight = holder[0].weight.detach().chunk(size, dim)[rank].requires_grad_()
    part = states if by_columns else states.detach().chunk(size, -1)[rank].requires_grad_()
    with Collectives() as forward:
        ours = product(part, weight)
    with Collectives() as backward:
        found = list(torch.autograd.grad(ours, [part, weight], wave.chunk(size, -1)[rank] if by_columns else wave))
    is_rowwise = float8.startswith("rowwise")
    assert forward.counts.total() == int(not (is_rowwise and by_columns))
    assert backward.counts.total() == int(not is_rowwise or by_columns)
    if by_columns:
        dist.all_reduce(found[0])
        wanted = [expected.chunk(size, -1)[rank], of_states, of_weight.chunk(size, 0)[rank]]
    else:
        dist.all_reduce(ours := ours.detach())
        wanted = [expected, of_states.chunk(size, -1)[rank], of_weight.chunk(size, 1)[rank]]
    pairs = zip([ours, *found], wanted, strict=True)
    return [float((one - other).detach().abs().max() / other.detach().abs().max()) for one, other in pairs]


def all_errors_of_parts(recipes: list[str]) -> dict[str, list[float]]:
    """By recipe, role and sizes; parts of 24 and 8 are no multiples of 16."""
    return {
        f"{recipe} by_columns={by_columns} {sizes}": errors_of_parts(recipe, by_columns, sizes)
        for recipe, by_columns, sizes in itertools.product(recipes, (True, False), ((32, 64), (48, 16)))
    }


def test_parts_are_rounded_as_the_whole_is(ranks: Any) -> None:
    """Elements differ in size by their index, so that parts by themselves would have other scales."""
    for found in ranks(2).run(all_errors_of_parts, [f"{recipe}:emulate" for recipe in RECIPES]):
        assert {name: errors for name, errors in found.items() if not largest(errors) <= 1e-6} == {}


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="seen in 2.13: the CPU multiplies in float8, too")
@pytest.mark.parametrize(("recipe", "tolerance"), [("tensorwise", 1e-6), ("rowwise", 2**-7)])
def test_parts_of_kernels(ranks: Any, recipe: str, tolerance: float) -> None:
    """Those for rows return bf16, so that each summand is rounded to eight bits."""
    for found in ranks(2).run(all_errors_of_parts, [recipe]):
        assert {name: errors for name, errors in found.items() if not largest(errors) <= tolerance} == {}


@pytest.mark.parametrize(
    ("case", "recipe", "size", "options"),
    [
        ("byte_gpt", "tensorwise", 2, "tensor=2"),  # tensors between its maps are DTensors
        ("llama", "tensorwise", 2, "tensor=2,sequence=true"),
        ("one_key_head", "rowwise", 2, "tensor=2"),  # keys and values stay whole
        ("llama", "rowwise", 4, "tensor=2,context=2"),
    ],
)
def test_split_layers_train_as_one_device_does(ranks: Any, case: str, recipe: str, size: int, options: str) -> None:
    float8 = f"float8={recipe}:emulate"
    expected = once(train, case, "sgd", f"dp_custom:{float8}", 1)
    ours = ranks(size).run(train, case, "sgd", f"tp_custom:{options},{float8}", size, readers=1)[0]
    assert worst(ours, expected) < TOLERANCE
    assert worst(reference(case, "sgd"), expected) > 50 * TOLERANCE


@pytest.mark.parametrize("recipe", RECIPES)
def test_ranks_that_read_other_samples_scale_by_their_own(ranks: Any, recipe: str) -> None:
    option = f"float8={recipe}:emulate"
    expected = ranks(2).run(train, "byte_gpt", "sgd", f"ddp_custom:{option}", 2)[0]
    ours = ranks(4).run(train, "byte_gpt", "sgd", f"fsdp_tp_custom:{option}", 4)[0]
    assert worst(ours, expected) < FLIP


def test_layers_on_parts_of_sequences_are_compared_in_full_digits(ranks: Any) -> None:
    """What sums in another order round to would count as a difference."""
    expected = once(train, "llama", "sgd", "dp_custom:float8=rowwise:emulate", 1)
    ours = ranks(2).run(train, "llama", "sgd", "cp_custom:float8=rowwise:emulate", 2)[0]
    assert worst(ours, expected) < TOLERANCE

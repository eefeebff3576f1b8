"""The order in which a step calls the layers of several stacks, and the results that pass layers by: without ranks."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from lightning_parallel import ConfigurationError
from lightning_parallel.module.layer_stacks import find_layers
from lightning_parallel.module.left_values import LeftValues
from lightning_parallel.techniques.pipeline.call_order import traced_order
from lightning_parallel.techniques.pipeline.carried import CarriedResult
from lightning_parallel.techniques.pipeline.layer_router import apply_layer_router
from lightning_parallel.techniques.pipeline.placement import (
    BEFORE_THE_STACK,
    corrected,
    misplaced,
    placed_by_registration,
    plan_stages,
    trace_positions,
)
from lightning_parallel.techniques.pipeline.schedules import PipelinePolicy
from lightning_parallel.techniques.pipeline.side_inputs import SideInputs
from lightning_parallel.techniques.pipeline.stage_plan import StagePlan
from tests.models.cases import LENGTH, VOCABULARY, Case
from tests.models.several_stacks import Alternating, CaiT, CalledTwice, Pyramid, Skipping, Towers, Translator
from tests.models.stacked import Mixer

TOKENS = torch.arange(2 * LENGTH).view(2, LENGTH) % VOCABULARY


class Backwards(Pyramid):
    """The second stack from its last layer to its first."""

    def __init__(self) -> None:
        super().__init__()
        self.low = _Reversed(self.low)


class _Reversed(nn.ModuleList):
    def __iter__(self) -> Iterator[nn.Module]:
        return reversed(list(super().__iter__()))


def order_of(module: Case, counts: tuple[int, ...] = (1, 3)) -> tuple[str, ...] | None:
    structure = find_layers(module)
    plan, left = StagePlan(2, (counts[0], len(structure.layers))), LeftValues(module, structure.layers)
    router = apply_layer_router(
        [(path, module.get_submodule(path)) for path in structure.layers],
        plan,
        rank=0,
        left_values=left,
    )
    return traced_order(module, structure.stacks, router, structure.layers, step=lambda: module.loss(TOKENS))


def test_the_order_of_calls() -> None:
    images = tuple(f"of_images.{i}" for i in range(3))
    assert order_of(Towers()) == (*images, "of_texts.0", "of_texts.1")
    assert order_of(Alternating()) == ("blocks.0", "mixers.0", "blocks.1", "mixers.1")
    assert order_of(Skipping()) == find_layers(Skipping()).layers


def test_a_stack_in_another_order_is_none() -> None:
    assert order_of(Backwards()) is None


def test_the_stacks_that_can_be_cut_are_named() -> None:
    with pytest.raises(ConfigurationError, match=r"each layer of high once.* give layers=low, which leaves high whole"):
        order_of(CalledTwice())


class WithTeacher(Towers):
    """A copy of a stack that no step calls."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.of_images)


def test_a_stack_that_is_not_called_is_not_in_the_order() -> None:
    assert order_of(WithTeacher(), (2, 6)) == order_of(Towers())


def passing(module: Case, ends: tuple[int, ...]) -> list[int]:
    """For each stage but the first, how many tensors it receives."""
    return [side_inputs_of(module, ends).num_passed("step", stage) for stage in range(1, len(ends))]


def side_inputs_of(module: Case, ends: tuple[int, ...]) -> SideInputs:
    layers = find_layers(module).layers
    left = LeftValues(module, layers)
    router = apply_layer_router(
        [(p, module.get_submodule(p)) for p in layers],
        StagePlan(len(ends), ends),
        rank=0,
        left_values=left,
    )
    assert trace_positions(module, router, "step", lambda: module.loss(TOKENS)) is not None
    return router.side_inputs


@pytest.mark.parametrize(
    ("module", "ends", "expected"),
    [
        (Translator, (3, 5), [2]),  # the embedded target, and what the encoder returns
        (Translator, (2, 5), [2]),  # hidden states of the encoder, and the embedded target, which passes its layers by
        (Translator, (1, 4, 5), [2, 2]),
        (Pyramid, (2, 5), [1]),
        (CaiT, (1, 4), [1]),
        (CaiT, (3, 4), [2]),
        (Skipping, (1, 6), [1]),
        (Skipping, (3, 6), [3]),  # what `down.2` has returned is in the hidden states; two others pass
        (Skipping, (5, 6), [1]),
    ],
)
def test_no_more_passes_than_is_used(module: type[Case], ends: tuple[int, ...], expected: list[int]) -> None:
    assert passing(module(), ends) == expected


def test_a_result_is_sent_over_each_boundary_between_its_place_and_its_use() -> None:
    result = CarriedResult(made=1, used=4, given={3})
    assert [start for start in range(7) if result.crosses(start)] == [2, 4]


def test_positions_of_a_first_trace_replace_the_guess() -> None:
    """Also those that fit the stages of now: new ones may lie elsewhere."""
    guess = {"early": frozenset({BEFORE_THE_STACK}), "late": frozenset({3}), "unused": frozenset({0})}
    traced = {"early": frozenset({1}), "late": frozenset({BEFORE_THE_STACK})}
    found = corrected(guess, traced, is_first=True)
    assert found == {**traced, "unused": frozenset({0})}
    assert corrected(guess, traced, is_first=False)["early"] == frozenset({BEFORE_THE_STACK, 1})
    assert misplaced(found, guess, StagePlan(2, (2, 4))) == ["late"]
    assert misplaced(found, guess, StagePlan(2, (1, 4))) == ["early", "late"]


def test_what_is_between_stacks_counts_where_it_runs() -> None:
    """A merge that is larger than all layers moves the cut before the layer behind which it runs."""
    module = Pyramid()
    module.merge = nn.Linear(200, 200)
    module.low = nn.ModuleList(Mixer(8) for _ in range(3))
    placement = placed_by_registration(module, find_layers(module).layers)
    assert plan_stages(module, placement, PipelinePolicy(), 2).counts == (1, 4)

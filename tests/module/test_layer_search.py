"""Layers that are arranged otherwise than in one list of one class: how they are found, and that they train alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn

from lightning_parallel.errors import ConfigurationError
from lightning_parallel.module.layer_search import split_slice
from lightning_parallel.module.layer_stacks import find_layers
from tests.models.cases import Block
from tests.models.stacked import (
    STACKED_MODULES,
    FeedForward,
    Flat,
    FlatWithModules,
    Hybrid,
    ListOfLists,
    Mixer,
    OtherBlock,
    PairsOfBlocks,
    Repeated,
)
from tests.parity import TOLERANCE, reference, train, worst
from tests.rank_pool import RankError


class Masked(nn.Module):
    """A layer with other arguments than a block."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.map = nn.Sequential(nn.Linear(width, width))

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        return self.map(hidden) * mask


def of(**children: nn.Module) -> nn.Module:
    module = nn.Module()
    for name, child in children.items():
        setattr(module, name, child)
    return module


def stacks(module: nn.Module) -> dict[str, tuple[str, ...]]:
    return {stack.path: stack.layers for stack in find_layers(module).stacks}


@pytest.mark.parametrize("kind", [Flat, FlatWithModules])
def test_a_run_in_a_container(kind: type[Flat]) -> None:
    structure = find_layers(kind())
    (stack,) = structure.stacks
    assert stack.path == "net.1:5"
    assert stack.layers == structure.units == ("net.1", "net.2", "net.3", "net.4")
    assert {path[:5] for path in structure.prologue} == {"net.0"}
    assert {path[:5] for path in structure.epilogue} <= {"net.5", "net.6"}
    assert structure.between == ()


@pytest.mark.parametrize("layers", ["net.1:5", "net.1:-2", "net.-6:5"])
def test_slices(layers: str) -> None:
    assert find_layers(Flat(), layers).layers == find_layers(Flat(), [layers]).layers == find_layers(Flat()).layers


def test_what_a_search_finds_can_be_named() -> None:
    for make in STACKED_MODULES.values():
        module = make()
        found = find_layers(module)
        assert find_layers(module, [stack.path for stack in found.stacks]) == found


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("net.1:-1", ("net", slice(1, -1))),
        ("net.:", ("net", slice(None, None))),
        ("net.2:", ("net", slice(2, None))),
        ("net.1", ("net.1", None)),
        ("net", ("net", None)),
        ("a.b:c", ("a.b:c", None)),
        ("", ("", None)),
    ],
)
def test_what_a_slice_is(path: str, expected: Any) -> None:
    assert split_slice(path) == expected


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("net.9:12", "layers='net.9:12' has no module with parameters in that slice of 7 children"),
        ("nets.1:-1", "layers='nets.1:-1' does not exist in Flat; its containers of modules: net"),
        ("net.6.1:-1", "layers='net.6.1:-1' is a Linear, not a ModuleList"),
    ],
)
def test_slices_without_layers(path: str, words: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        find_layers(Flat(), path)
    assert words in str(caught.value)


# Layers of several classes ------------------------------------------------------------------------------------------


def test_classes_that_take_turns() -> None:
    structure = find_layers(Hybrid())
    assert stacks(Hybrid()) == {"layers": ("layers.0", "layers.1", "layers.2", "layers.3")}
    assert "stack layers: 4 x Block|Mixer, 2,064 parameters on average" in structure.explain()


@pytest.mark.parametrize(
    ("classes", "expected"),
    [
        ([Masked, Block, Mixer, Block, Mixer], "layers.1:5"),  # other arguments
        ([FeedForward, Block, Block, Block], "layers.1:4"),
        ([Mixer, Block, OtherBlock, Block, OtherBlock, FeedForward], "layers.1:5"),  # a prologue of the same arguments
        ([OtherBlock, Block, Block, OtherBlock], "layers.1:3"),  # prologue and epilogue of one class
        ([Block, Mixer], ""),
        ([Block, Mixer, FeedForward], ""),
    ],
)
def test_parts_of_a_list(classes: list[Callable[[], nn.Module]], expected: str) -> None:
    module = of(layers=nn.ModuleList(make() for make in classes))
    assert list(stacks(module)) == ([expected] if expected else [])


def test_layers_of_other_arguments_are_two_stacks() -> None:
    module = of(layers=nn.ModuleList([Block(), Block(), Masked(), Masked()]))
    assert list(stacks(module)) == ["layers.0:2", "layers.2:4"]


def test_what_has_no_children_may_stand_between() -> None:
    module = of(net=nn.Sequential(Block(), nn.Dropout(0.1), Block(), nn.LayerNorm(16), Block(), nn.Linear(16, 4)))
    structure = find_layers(module)
    (stack,) = structure.stacks
    assert (stack.path, stack.layers) == ("net.0:5", ("net.0", "net.2", "net.4"))
    assert stack.chains == (("net.0",), ("net.2",), ("net.4",))  # code between layers may mix positions
    assert (structure.between, structure.epilogue) == (("net.3",), ("net.5",))


def test_towers_are_no_layers() -> None:
    towers = {"text": Hybrid(), "image": Flat()}
    assert list(stacks(of(towers=nn.ModuleDict(towers)))) == ["towers.text.layers", "towers.image.net.1:5"]


# Lists of lists -----------------------------------------------------------------------------------------------------


def test_a_list_of_lists() -> None:
    structure = find_layers(ListOfLists())
    (stack,) = structure.stacks
    assert (stack.path, stack.layer_type) == ("layers", "Attention|FeedForward")
    assert stack.layers == structure.units == ("layers.0.1", "layers.1.1", "layers.2.1", "layers.3.1")
    assert structure.between == ("layers.1.0", "layers.2.0", "layers.3.0")
    assert stack.chains == tuple((layer,) for layer in stack.layers)
    assert find_layers(ListOfLists(), "layers.1:3").layers == ("layers.1.1", "layers.2.1")


def test_a_list_of_lists_of_layers_of_one_class() -> None:
    (stack,) = find_layers(PairsOfBlocks()).stacks
    assert stack.chains == (("layers.0.0", "layers.0.1", "layers.1.0", "layers.1.1"),)


def test_a_list_of_lists_of_linear_maps_is_no_stack() -> None:
    module = of(layers=nn.ModuleList(nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]) for _ in range(2)))
    assert stacks(module) == {}
    assert find_layers(module, "layers").layers == ("layers.0.0", "layers.0.1", "layers.1.0", "layers.1.1")


# Layers that are called again ---------------------------------------------------------------------------------------


def test_a_layer_that_stands_at_several_places() -> None:
    structure = find_layers(Repeated())
    assert structure.layers == ("layers.0",) * 4
    assert structure.units == ("layers.0",)
    assert structure.stacks[0].chains == (("layers.0",),)
    assert "stack layers: 4 x Block (of 1 that are called again), 3,280 parameters each" in structure.explain()


def test_a_list_of_one_layer() -> None:
    assert stacks(of(groups=nn.ModuleList([Block()]))) == {"groups": ("groups.0",)}
    assert stacks(of(layers=nn.ModuleList([Block(), Block()]), extra=nn.ModuleList([Mixer()]))) == {
        "layers": ("layers.0", "layers.1")
    }


def test_layers_under_two_names_are_in_the_longer_stack() -> None:
    for name, layers in {
        "two_names": ("layers.0", "layers.1", "layers.2", "layers.3"),
        "partly_two_names": ("layers.0", "layers.1", "layers.2", "layers.3"),
        "partly_reversed": ("backbone.0", "backbone.1", "layers.2", "layers.3"),
    }.items():
        assert stacks(STACKED_MODULES[name]()) == {"layers": layers}


def test_what_is_inside_of_a_layer_is_no_stack() -> None:
    module = of(experts=nn.ModuleList([Mixer(), Mixer()]), layers=nn.ModuleList([Block(), Block()]))
    module.layers[0].experts = module.experts
    assert list(stacks(module)) == ["layers"]


# Against one process ------------------------------------------------------------------------------------------------

SEQUENCE = "tp_custom:sequence=true"
NAMES = ("fsdp_custom", "tp_custom", SEQUENCE, "cp_custom", "pp_custom")
REFUSED = {
    ("list_of_lists", SEQUENCE): "sequence=False",  # attention asks for the length before its maps gather
    ("pairs_of_branches", SEQUENCE): "sequence=False",
    (
        "called_in_a_row",
        SEQUENCE,
    ): "or called a layer again before the last one; only the result of the last layer",
    ("called_in_a_row", "cp_custom"): "layers=[layers.0:1, layers.1:2], which makes a stack of each layer, or con",
    (
        "partly_two_names",
        SEQUENCE,
    ): "code before layers.2 computes its hidden states with backbone.2.bias, ",
    ("albert", SEQUENCE): "sequence=False",
    ("albert", "pp_custom"): "has 1 layers",
    ("albert_groups", SEQUENCE): "sequence=False",
    ("albert_groups", "cp_custom"): "left it before the last layer",
    ("jamba", SEQUENCE): "sequence=False",
    ("jamba", "cp_custom"): "computes no attention by itself",
    ("zamba", SEQUENCE): "sequence=False",
    ("zamba", "cp_custom"): "computes no attention by itself",
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", STACKED_MODULES)
def test_parity(ranks: Any, case: str, name: str) -> None:
    if reason := REFUSED.get((case, name)):
        with pytest.raises(RankError) as caught:
            ranks(2).run(train, case, "adamw", name, 2, steps=3)
        assert reason in str(caught.value)
        return
    ours = ranks(2).run(train, case, "adamw", name, 2, steps=3)[0]
    assert worst(ours, reference(case, steps=3)) < TOLERANCE


@pytest.mark.parametrize("name", [SEQUENCE, "cp_custom"])
def test_a_stack_of_each_layer(ranks: Any, name: str) -> None:
    strategy = f"{name}{',' if ':' in name else ':'}layers=[layers.0:1,layers.1:2]"
    ours = ranks(2).run(train, "called_in_a_row", "adamw", strategy, 2, 1, steps=3)[0]
    assert worst(ours, reference("called_in_a_row", steps=3)) < TOLERANCE


@pytest.mark.parametrize("case", ["flat", "hybrid_attention", "repeated_pair"])
@pytest.mark.parametrize(
    ("name", "readers"),
    [
        ("fsdp_custom:pipeline=2", 2),
        ("fsdp_custom:tensor=2", 2),
        ("fsdp_custom:tensor=2,pipeline=2", 1),
        ("fsdp_custom:context=2,pipeline=2", 1),
    ],
)
def test_parity_of_products(ranks: Any, case: str, name: str, readers: int) -> None:
    ours = ranks(4).run(train, case, "adamw", name, 4, readers, steps=3)[0]
    assert worst(ours, reference(case, steps=3)) < TOLERANCE

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_parallel.errors import ConfigurationError
from lightning_parallel.module import layer_stacks
from lightning_parallel.module.layer_stacks import find_layers
from tests.models.cases import CASES, GPT, Block


def test_gpt() -> None:
    structure = find_layers(CASES["byte_gpt"]())
    assert [stack.path for stack in structure.stacks] == ["model.blocks"]
    assert structure.layers == structure.units == ("model.blocks.0", "model.blocks.1", "model.blocks.2")
    assert structure.prologue == ("model.tokens", "model.positions")
    assert structure.epilogue == ("model.norm", "model.head")
    assert structure.explain().splitlines() == [
        "11,152 parameters",
        "stack model.blocks: 3 x Block, 3,280 parameters each",
        "prologue: model.tokens, model.positions",
        "epilogue: model.norm, model.head",
    ]


def test_two_stacks() -> None:
    structure = find_layers(CASES["encoder_decoder"]())
    assert [stack.path for stack in structure.stacks] == ["transformer.encoder.layers", "transformer.decoder.layers"]
    assert structure.between == ("transformer.encoder.norm",)
    assert structure.epilogue == ("transformer.decoder.norm", "head")


@pytest.mark.parametrize("case", ["lstm", "conv_net", "gan"])
def test_no_stack(case: str) -> None:
    structure = find_layers(CASES[case]())
    assert structure.stacks == ()
    assert structure.epilogue == ()
    assert "no stack of repeated layers" in structure.explain()


def test_hugging_face() -> None:
    structure = find_layers(CASES["hf_gpt2"]())
    assert [stack.path for stack in structure.stacks] == ["model.transformer.h"]
    assert structure.units == structure.layers  # the tied embedding and head are both outside the stack


def test_outermost_stack_wins() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(Block() for _ in range(3))

    module = nn.Module()
    module.layers = nn.ModuleList(Layer() for _ in range(2))
    assert find_layers(module).layers == ("layers.0", "layers.1")


def test_stages_of_a_residual_network() -> None:
    module = nn.Module()
    module.stage1 = nn.Sequential(Block(), Block())
    module.stage2 = nn.Sequential(Block(32, 2), Block(32, 2), Block(32, 2))
    assert len(find_layers(module).stacks) == 2
    assert len(find_layers(module).units) == 5


def test_shared_parameters_are_no_units() -> None:
    module = GPT()
    module.blocks[1].mlp[0].weight = module.blocks[0].mlp[0].weight
    structure = find_layers(module)
    assert structure.units == ("blocks.2",)
    assert structure.shared == {"blocks.0": "blocks.1.mlp.0.weight", "blocks.1": "blocks.0.mlp.0.weight"}
    assert "blocks.1 is no unit of its own: it shares blocks.0.mlp.0.weight" in structure.explain()


def test_leaf_lists_are_no_stack() -> None:
    module = nn.Module()
    module.tables = nn.ModuleList(nn.Embedding(4, 4) for _ in range(3))
    assert find_layers(module).stacks == ()


def test_large_submodules_are_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_stacks, "LARGE_UNIT_NUMEL", 100)
    structure = find_layers(CASES["gan"]())
    assert structure.units == ("generator", "discriminator")
    assert find_layers(CASES["gan"](), []).units == ()  # the user wants one unit


def test_the_user_may_point_at_the_stack() -> None:
    module = nn.Module()
    module.parts = nn.ModuleList([Block(), nn.Sequential(nn.Linear(2, 2))])
    assert find_layers(module).stacks == ()
    assert find_layers(module, "parts").stacks[0].layer_type == "Block|Sequential"
    assert find_layers(module, ["parts"]).layers == ("parts.0", "parts.1")


@pytest.mark.parametrize(
    ("path", "words"),
    [("model.block", "does not exist"), ("model.head", "is a Linear, not a ModuleList"), ("", "is a ByteGPT")],
)
def test_paths_that_are_no_stack(path: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=r"model\.blocks") as caught:
        find_layers(CASES["byte_gpt"](), path)
    assert words in str(caught.value)


def test_nothing_is_changed() -> None:
    module = CASES["byte_gpt"]()
    before = {name: id(parameter) for name, parameter in module.named_parameters()}
    find_layers(module).explain()
    assert before == {name: id(parameter) for name, parameter in module.named_parameters()}


def test_meta_modules_are_described() -> None:
    with torch.device("meta"):
        assert len(find_layers(GPT()).layers) == 3

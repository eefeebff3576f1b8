"""Layers and degrees that tensor parallel refuses, in words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_parallel import ConfigurationError, build_strategy
from tests.data import batches
from tests.models.cases import CASES
from tests.models.hugging_face import Llama
from tests.models.layered import Hard, Scaled
from tests.models.tables import TENSOR_MODULES
from tests.parity import make_trainer


class Narrow(Hard):
    """Ten features in the middle, which three or four ranks cannot share."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer, make=lambda: nn.Sequential(nn.Linear(16, 10), nn.GELU(), nn.Linear(10, 16)))


class Lone(Hard):
    """One map a layer: there is no pair of maps with features between them."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer, make=lambda: nn.Sequential(nn.Linear(16, 16), nn.GELU()))


REFUSED = {
    **TENSOR_MODULES, "narrow": Narrow, "lone": Lone, "lstm": CASES["lstm"],
    "three_key_heads": lambda: Llama(kv_heads=4),
}  # fmt: skip


@pytest.mark.parametrize(
    ("case", "size", "options", "words"),
    [
        ("byte_gpt", 4, "", ["model.blocks.0: tensor=4 cannot share 2 heads; possible: 1, 2"]),
        ("llama", 3, "", ["tensor=3 cannot share 4 heads and 2 heads of keys and values; possible: 1, 2, 4"]),
        ("encoder", 8, "", ["cannot share 4 heads", "possible: 1, 2, 4"]),
        ("narrow", 4, "", ["tensor=4 does not divide the 10 outputs of blocks.0.0", "possible: 1, 2, 5, 10"]),
        ("hard", 2, "tensor_plan={upp: colwise}", ["'upp' names no linear map of the layers", "up"]),
        ("hard", 2, "tensor_plan={up: columns}", ["'columns' for 'up' is unknown", "colwise, rowwise, replicate"]),
        ("hard", 2, "tensor_plan={norm1: colwise}", ["'norm1' names no linear map"]),
        ("hard", 2, "tensor_plan={head: colwise}", ["'head' names no linear map of the layers"]),
        ("hard", 2, "tensor_plan={up: replicate}", ["no branch of linear maps"]),
        ("hard", 2, "tensor_plan={}", ["no branch of linear maps"]),
        ("lone", 2, "", ["tensor=2: no branch of linear maps was found", "tensor=1"]),
        ("lstm", 2, "", ["tensor=2 works layer by layer, and LSTMModel has no stack of repeated layers", "layers="]),
        (
            "narrow", 4, "tensor_plan={blocks.*.0: colwise, upp: columns}",
            ["5 problems", "'upp' names no", "'columns' for 'upp'", "does not divide the 10 outputs"],
        ),
    ],
)  # fmt: skip
def test_refused_before_processes_start(
    case: str, size: int, options: str, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("subprocess.Popen", lambda *args, **kwargs: pytest.fail("a process was started"))
    trainer = make_trainer(build_strategy(f"tp_custom:{options}"), size)
    with pytest.raises(ConfigurationError) as caught:
        trainer.fit(REFUSED[case](), batches("byte_gpt", 1))
    assert not dist.is_initialized()
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)


class Grouped(nn.Module):
    """A convolution between the maps, which knows how many channels there are."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.mix = nn.Conv1d(32, 32, 3, padding=1, groups=32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.mix(self.up(x).transpose(1, 2)).transpose(1, 2))


class Doubling(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(16, 32), nn.GELU(), Scaled(32, 16))


class ByItsWidth(nn.Module):
    """It multiplies with the number of features, as a kernel sees it, which is given those of its rank."""

    def forward(self, x: Tensor) -> Tensor:
        local = x.to_local() if isinstance(x, DTensor) else x
        return x * (local.shape[-1] / 32)


class Scaling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), ByItsWidth(), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.net(x)


class Differing(Hard):
    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer, make=Scaling)


class NotLinear(Hard):
    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer, make=Doubling)


class Convolved(Hard):
    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer, make=Grouped)


def refusal(make: Any, options: str) -> str:
    try:
        make_trainer(build_strategy(f"tp_custom:{options}"), 2).fit(make(), batches("byte_gpt", 1))
    except ConfigurationError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (
            Differing,
            "",
            ["computes something else when its linear maps are split", "its result differs by", "tensor=1"],
        ),
        (NotLinear, "", ["no branch of linear maps was found", "tensor_plan", "tensor=1"]),
        (TENSOR_MODULES["configure_model"], "tensor_plan={upp: colwise}", ["'upp' names no linear map"]),
    ],
)
def test_a_layer_that_cannot_be_split_is_refused(ranks: Any, make: Any, options: str, words: list[str]) -> None:
    message = ranks(2).run(refusal, make, options)[0]
    assert [word for word in words if word not in message] == [], message


def test_what_would_be_refused_can_be_left_whole(ranks: Any) -> None:
    assert ranks(2).run(refusal, NotLinear, "tensor_plan={blocks.*.0: colwise}") == ["", ""]
    for message in ranks(2).run(refusal, Convolved, ""):
        if torch.__version__ >= (2, 13):  # what torch cannot split runs on whole tensors
            assert message == ""
        else:  # torch 2.11 takes itself to be able to, and is wrong
            assert "the gradient of mix.weight differs by" in message

"""What stages hold, send and draw."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_parallel import build_strategy
from lightning_parallel.module.placeholders import is_placeholder
from lightning_parallel.techniques.sharding import is_sharded
from tests.collectives import Collectives
from tests.data import batches
from tests.models.cases import GPT
from tests.models.pipelined import Deep
from tests.models.tables import PIPELINE_MODULES
from tests.parity import make_trainer


def held(strategy: str, num_ranks: int, case: str) -> tuple[int, int, list[str]]:
    """Elements in the memory of parameters and of optimizer state while training, and the layers with any."""
    found: list[Any] = []

    class Count(L.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            local = {n: p.to_local() for n, p in module.named_parameters() if isinstance(p, DTensor)}
            for name, parameter in module.named_parameters():
                if name not in local and not is_placeholder(parameter):
                    local[name] = parameter
                elif name not in local:
                    with pytest.raises(RuntimeError):
                        parameter.untyped_storage().data_ptr()
            states = dict.values(trainer.optimizers[0].state)  # of this rank: hooks are refused a part
            state = sum(value.numel() for each in states for name, value in each.items() if name != "step")
            layers = sorted({name.split(".")[2] for name in local if ".blocks." in name})
            found[:] = [sum(p.numel() for p in local.values()), state, layers, is_sharded(module)]

    module = PIPELINE_MODULES[case]("adamw") if case != "configured" else DeepConfigured()
    trainer = make_trainer(build_strategy(strategy), num_ranks, callbacks=[Count()])
    trainer.fit(module, batches("byte_gpt", 1, 2))
    return tuple(found)  # type: ignore[return-value]


class DeepConfigured(Deep):
    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        del self.model

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            self.model = GPT(depth=4)


@pytest.mark.parametrize("case", ["deep", "configured"])
def test_a_stage_holds_only_its_layers(ranks: Any, case: str) -> None:
    """And nobody gathers what no other rank has."""
    model = GPT(depth=4)
    layer = sum(p.numel() for p in model.blocks[0].parameters())
    before = model.tokens.weight.numel() + model.positions.weight.numel()
    after = sum(p.numel() for p in (*model.norm.parameters(), *model.head.parameters()))
    first, last = ranks(2).run(held, "pp_custom", 2, case)
    assert first == (before + 2 * layer, 2 * (before + 2 * layer), ["0", "1"], False)
    assert last == (after + 2 * layer, 2 * (after + 2 * layer), ["2", "3"], False)


def sent(strategy: str, num_readers: int) -> dict[str, int]:
    """Messages of hidden states, and reductions over data ranks, of the second step."""
    mode = Collectives()

    class Module(Deep):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                mode.__enter__()

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            if self.global_step == 1:
                mode.__exit__(None, None, None)

    trainer = make_trainer(build_strategy(strategy), dist.get_world_size())
    trainer.fit(Module(), batches("byte_gpt", num_readers, 3))
    count = dict.fromkeys(("send", "recv_", "reduce_scatter"), 0)
    for (kind, dtype), number in mode.counts.items():
        if dtype == torch.float32 and kind in count:
            count[kind] += number
    return count


def test_one_activation_and_one_gradient_a_microbatch(ranks: Any) -> None:
    for counted in ranks(2).run(sent, "pp_custom:microbatches=4", 1):
        assert (counted["send"], counted["recv_"]) == (4, 4)


@pytest.mark.parametrize("microbatches", [2, 4])
def test_gradients_are_reduced_once_a_step(ranks: Any, microbatches: int) -> None:
    """Two layers and what is around them on each rank, however many microbatches there are."""
    for counted in ranks(4).run(sent, f"fsdp_custom:pipeline=2,microbatches={microbatches}", 2):
        assert counted["reduce_scatter"] == 3


# Random numbers -----------------------------------------------------------------------------------------------------


class Dropped(Deep):
    """Notes what it draws before the layers, and the first numbers that each layer draws."""

    def __init__(self) -> None:
        super().__init__()
        self.outside: list[float] = []
        self.inside: list[Tensor] = []
        for block in self.model.blocks:
            block.mlp.append(_Noted(self.inside))

    def loss(self, tokens: Tensor) -> Tensor:
        self.outside.append(float(torch.rand(())))
        return super().loss(tokens)


class _Noted(nn.Module):
    def __init__(self, noted: list[Tensor]) -> None:
        super().__init__()
        self.noted = noted

    def forward(self, x: Tensor) -> Tensor:
        mask = F.dropout(torch.ones(64), training=self.training)
        self.noted.append(mask)
        return x * mask[:16]


def drawn(strategy: str) -> tuple[list[float], list[Tensor]]:
    L.seed_everything(3, verbose=False)
    module = Dropped()
    make_trainer(build_strategy(strategy), 2).fit(module, batches("byte_gpt", 1, 1))
    return module.outside, module.inside


def test_stages_draw_alike_outside_of_layers_and_apart_inside(ranks: Any) -> None:
    (outside, first), (outside_of_last, last) = ranks(2).run(drawn, "pp_custom:schedule=gpipe")
    assert outside == outside_of_last
    assert len(set(outside)) == len(outside) == 4  # another number for each microbatch
    masks = [tuple(mask.tolist()) for mask in (*first[-8:], *last[-8:])]
    assert len(set(masks)) == 16

"""What we do and Lightning's own strategies do not: each claim holds for ours and fails for theirs."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_parallel import build_strategy
from tests.data import data_of
from tests.jobs.lifecycle import forced_inference_mode
from tests.models.cases import CASES, ByteGPT
from tests.parity import make_trainer

OURS, THEIRS = "ours", "theirs"


class ByHand(ByteGPT):
    """The same module, sharded by hand as Lightning's documentation shows."""

    def configure_model(self) -> None:
        if isinstance(self.model, FSDPModule):
            return
        mesh = self.device_mesh["data_parallel"]
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)


class WithBias(ByteGPT):
    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__(optimizer)
        self.bias = nn.Parameter(torch.zeros(32))

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) + self.bias


class WithBiasByHand(WithBias, ByHand):
    """A parameter on the LightningModule, which `fully_shard(self.model)` does not see."""


def fitted(whose: str, ours: type[ByteGPT], theirs: type[ByteGPT], seed: int = 3) -> tuple[Any, L.Trainer]:
    """A module after two steps under FSDP2, ours or Lightning's, on two ranks."""
    torch.manual_seed(seed)
    module = ours() if whose == OURS else theirs()
    module.example_seed = seed
    strategy = build_strategy("fsdp_custom") if whose == OURS else ModelParallelStrategy(2, 1)
    trainer = make_trainer(strategy, 2)
    trainer.fit(module, DataLoader(data_of("byte_gpt", 8, 4), batch_size=2))
    return module, trainer


def equal_on_all_ranks(tensor: Tensor) -> bool:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    first = whole.detach().clone()
    dist.broadcast(first, 0)
    same = torch.tensor(float(torch.equal(first, whole.detach())))
    dist.all_reduce(same, op=dist.ReduceOp.MIN)
    return bool(same.item())


def unchanged_module_trains(whose: str) -> bool:
    try:
        fitted(whose, ByteGPT, ByteGPT)
    except TypeError:
        return False
    return True


def bare_parameter_is_averaged(whose: str) -> bool:
    module, _ = fitted(whose, WithBias, WithBiasByHand)
    return equal_on_all_ranks(module.bias)


def ranks_start_from_one_model(whose: str) -> bool:
    """Each rank builds from its own seed; one step of a rate of nothing shows what was sharded."""

    def nothing(module: Any) -> Any:
        return torch.optim.SGD(module.parameters(), lr=0.0)

    rank = dist.get_rank() if dist.is_initialized() else int(os.environ["LOCAL_RANK"])
    with mock.patch.object(ByteGPT, "configure_optimizers", nothing):
        module, _ = fitted(whose, ByteGPT, ByHand, seed=rank)
    torch.manual_seed(0)
    expected = ByteGPT().model.head.weight
    head = module.model.head.weight
    whole = head.full_tensor() if isinstance(head, DTensor) else head
    return bool(torch.equal(whole, expected))


def module_is_plain_after_fit(whose: str) -> bool:
    module, _ = fitted(whose, ByteGPT, ByHand)
    try:
        copied = copy.deepcopy(module)
        copied(torch.zeros(1, 4, dtype=torch.long))
    except Exception:
        return False
    return type(module.model).__name__ == "GPT"


def evaluation_may_come_first(whose: str) -> bool:
    if whose == OURS:
        forced_inference_mode("fsdp_custom", 2)
        return True
    with mock.patch("lightning.pytorch.loops.utilities.dist", SimpleNamespace(get_backend=lambda: "nccl")):
        trainer, module = make_trainer(ModelParallelStrategy(2, 1), 2), ByHand()
        loader = DataLoader(data_of("byte_gpt", 8, 4), batch_size=2)
        try:
            trainer.validate(module, loader, verbose=False)
            trainer.fit(module, loader)
        except RuntimeError:
            return False
    return True


def unshuffled_data_stays_in_order(whose: str) -> bool:
    seen = []

    class Module(ByteGPT):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            seen.append(batch[0][:, :4])

    strategy = build_strategy("ddp_custom") if whose == OURS else DDPStrategy()
    data = data_of("byte_gpt", 8, 4)
    make_trainer(strategy, 2).fit(Module(), DataLoader(data, batch_size=2))
    expected = torch.stack([data[i][0][:4] for i in range(dist.get_rank(), 8, 2)])
    return bool(torch.equal(torch.cat(seen), expected))


def compression_works_on_gloo(whose: str) -> bool:
    """A hook that is asked for is used: fp16 gradients are not those of fp32."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    weights = []
    for hook in (False, True):
        torch.manual_seed(3)
        module = ByteGPT()
        if whose == OURS:
            strategy: Any = build_strategy(f"ddp_custom:comm_hook={'fp16' if hook else 'none'}")
        else:
            strategy = DDPStrategy(ddp_comm_hook=fp16_compress_hook if hook else None)
        make_trainer(strategy, 2).fit(module, DataLoader(data_of("byte_gpt", 8, 4), batch_size=2))
        weights.append(module.model.head.weight.detach().clone())
    return not torch.equal(*weights)


def optimizer_made_before_sharding_trains(whose: str) -> bool:
    """LightningCLI makes its optimizer together with the module."""

    def train(base: type[ByteGPT]) -> bool:
        class Module(base):  # type: ignore[valid-type, misc]
            def __init__(self) -> None:
                super().__init__()
                self.made = torch.optim.SGD(self.parameters(), lr=0.1)

            def configure_optimizers(self) -> Any:
                return self.made

        torch.manual_seed(3)
        before = ByteGPT().model.head.weight
        module, _ = fitted(whose, Module, Module)
        head = module.model.head.weight
        whole = head.full_tensor() if isinstance(head, DTensor) else head
        return not torch.equal(whole, before)

    return train(ByteGPT if whose == OURS else ByHand)


def construction_goes_on_with_the_random_state(whose: str) -> bool:
    """What is built in `setup` has the weights that it has in one process: the seed is not set again before it."""

    class Module(ByteGPT):
        def setup(self, stage: str) -> None:
            self.late = nn.Linear(4, 4).requires_grad_(False)

    L.seed_everything(3, verbose=False)
    expected = ByteGPT(), nn.Linear(4, 4).weight
    L.seed_everything(3, verbose=False)
    module = Module()
    strategy = build_strategy("ddp_custom") if whose == OURS else DDPStrategy()
    make_trainer(strategy, 2).fit(module, DataLoader(data_of("byte_gpt", 8, 4), batch_size=2))
    return bool(torch.equal(module.late.weight, expected[1]))


CLAIMS = (
    construction_goes_on_with_the_random_state,
    unchanged_module_trains,
    bare_parameter_is_averaged,
    ranks_start_from_one_model,
    module_is_plain_after_fit,
    evaluation_may_come_first,
    unshuffled_data_stays_in_order,
    compression_works_on_gloo,
    optimizer_made_before_sharding_trains,
)


@pytest.mark.parametrize("claim", CLAIMS)
def test_claim_holds_for_ours(ranks: Any, claim: Callable[[str], bool]) -> None:
    assert ranks(2).run(claim, OURS) == [True, True]


@pytest.mark.parametrize("claim", CLAIMS)
def test_claim_fails_for_lightnings(ranks: Any, claim: Callable[[str], bool]) -> None:
    assert ranks(2).run(claim, THEIRS) == [False, False]


def test_cases_are_ordinary() -> None:
    assert all(issubclass(case, L.LightningModule) for case in CASES.values())

"""`Verify` ends a run whose ranks differ where they must not, and no other."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch.distributed.tensor import DTensor

from lightning_parallel import ConfigurationError, RanksDifferError, build_strategy
from lightning_parallel.callbacks import Verify
from tests.data import batches
from tests.models.cases import GAN, ByteGPT
from tests.models.pipelined import Deep, DeepTied
from tests.names import num_readers
from tests.parity import make_trainer

HEAD = "model.head.weight"


class Planted(Callback):
    """Does something by itself on the last rank, after the second step."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    @torch.no_grad()
    def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
        if self.kind == "start" and trainer.global_rank == 0:
            next(module.parameters()).add_(1)

    @torch.no_grad()
    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *args: Any) -> None:
        if trainer.global_step != 2 or trainer.global_rank != trainer.world_size - 1:
            return
        optimizer = trainer.optimizers[0]
        if self.kind == "weight":
            weight = module.model.head.weight
            (weight.to_local() if isinstance(weight, DTensor) else weight)[0, 0] += 1e-6
        if self.kind == "state":
            optimizer.state[module.model.head.weight]["exp_avg"].mul_(1.001)
        if self.kind == "rate":
            optimizer.param_groups[0]["lr"] *= 2


def fitted(strategy: str, num_ranks: int, kind: str = "", every: int = 1, make: Any = ByteGPT, **kwargs: Any) -> str:
    """Four steps, and the error of this rank."""
    L.seed_everything(3, verbose=False)
    case = kwargs.pop("case", "byte_gpt")
    num_steps = kwargs.pop("num_steps", 4)
    readers = kwargs.pop("readers", num_readers(strategy.partition(":")[0], num_ranks))
    built = build_strategy(strategy) if "custom" in strategy else strategy
    trainer = make_trainer(built, num_ranks, callbacks=[Planted(kind), Verify(every)], **kwargs)
    try:
        trainer.fit(make("adamw"), batches(case, readers, 4))
    except RanksDifferError as error:
        return str(error)
    assert trainer.global_step == num_steps
    return ""


@pytest.mark.parametrize(
    ("strategy", "size", "kind", "words"),
    [
        ("ddp_custom", 2, "weight", f"after step 2, {HEAD} differs between rank 0 and rank 1, though"),
        ("ddp_custom", 2, "state", f"exp_avg of {HEAD} in AdamW differs between rank 0 and rank 1"),
        ("ddp_custom", 2, "rate", "lr of group 0 of AdamW differs between rank 0 and rank 1"),
        ("fsdp_custom", 2, "rate", "lr of group 0 of AdamW differs"),
        ("zero1_custom", 2, "weight", f"{HEAD} differs"),
        ("hsdp_custom", 4, "weight", f"{HEAD} differs between rank 1 and rank 3"),
        ("tp_custom", 2, "rate", "lr of group 0 of AdamW differs"),
        ("ddp", 2, "weight", f"{HEAD} differs"),
    ],
)
def test_ranks_that_differ(ranks: Any, strategy: str, size: int, kind: str, words: str) -> None:
    first, *others = ranks(size).run(fitted, strategy, size, kind)
    assert words in first
    assert "they were equal after step 1" in first
    assert set(others) == {"ranks hold different values; rank 0 says which"}


def test_a_tied_weight_of_two_stages(ranks: Any) -> None:
    first, _ = ranks(2).run(fitted, "pp_custom", 2, "weight", make=DeepTied)
    assert "model.tokens.weight differs between rank 0 and rank 1" in first


@pytest.mark.parametrize(
    ("strategy", "size", "kwargs"),
    [
        *((name, 2, {}) for name in ("ddp_custom", "zero1_custom", "zero2_custom", "fsdp_custom", "tp_custom")),
        *((name, 2, {}) for name in ("cp_custom", "pp_custom", "fsdp_offload_custom", "ddp")),
        *((name, 4, {}) for name in ("hsdp_custom", "fsdp_tp_custom")),
        ("fsdp_custom:pipeline=2", 4, {"readers": 2}),
        ("fsdp_custom:context=2,replicate=2,shard=1", 4, {"readers": 2}),
        ("ddp_custom", 2, {"every": 3}),
        ("tp_custom:sequence=true", 2, {}),
        ("cp_custom:context_attention=ring", 2, {}),
        ("pp_custom", 4, {"make": DeepTied}),
        ("fsdp_custom:pipeline=2,tensor=2", 4, {"readers": 1, "make": DeepTied}),
        ("fsdp_custom", 4, {"accumulate_grad_batches": 2, "num_steps": 2}),
        ("ddp_custom", 2, {"make": GAN, "case": "gan", "num_steps": 8}),
    ],
)
def test_ranks_that_agree(ranks: Any, strategy: str, size: int, kwargs: dict[str, Any]) -> None:
    assert ranks(size).run(fitted, strategy, size, **{"make": Deep, **kwargs}) == [""] * size


@pytest.mark.parametrize("strategy", ["ddp_custom", "fsdp_custom"])
def test_one_of_two_optimizers_of_a_class(ranks: Any, strategy: str) -> None:
    first, _ = ranks(2).run(fitted, strategy, 2, "rate", make=GAN, case="gan")
    assert "lr of group 0 of AdamW 0 differs between rank 0 and rank 1" in first


def test_ranks_that_begin_differently(ranks: Any) -> None:
    """Where nothing was equal before, the message claims no such thing."""
    first, _ = ranks(2).run(fitted, "ddp_custom", 2, "start")
    assert first.startswith("before the first step of this fit (global_step=0), model.tokens.weight differs")
    assert "equal after" not in first
    assert "checkpoint" not in first


def test_a_difference_is_noticed_at_the_next_comparison(ranks: Any) -> None:
    first, _ = ranks(2).run(fitted, "ddp_custom", 2, "weight", every=3)
    assert "after step 3, " in first
    assert "they were equal after step 0" in first


def test_in_one_process() -> None:
    assert fitted("auto", 1) == ""


def test_no_number_of_steps() -> None:
    with pytest.raises(ConfigurationError, match="every=0 is no number of optimizer steps"):
        Verify(0)

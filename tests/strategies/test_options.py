"""Options that change no number: each is seen where it should arrive, because a run that ignores it trains as well."""

from __future__ import annotations

from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.data import loader
from tests.models.cases import LENGTH, Block, ByteGPT
from tests.parity import TOLERANCE, trainer_for


def as_wrapped(strategy: str) -> dict[str, Any]:
    """What DDP was given."""
    found: dict[str, Any] = {}
    register = DistributedDataParallel.register_comm_hook

    def noted(self: Any, state: Any, hook: Any) -> None:
        found["powersgd_rank"] = getattr(state, "matrix_approximation_rank", None)
        register(self, state, hook)

    class Look(Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
            wrapped: Any = trainer.strategy.model
            found["static_graph"] = wrapped.static_graph
            found["bucket_cap_mb"] = wrapped.bucket_bytes_cap / 2**20
            found["gradient_as_bucket_view"] = wrapped.gradient_as_bucket_view
            found["find_unused_parameters"] = wrapped.find_unused_parameters

    with mock.patch.object(DistributedDataParallel, "register_comm_hook", noted):
        trainer_for(strategy, 2, callbacks=[Look()]).fit(ByteGPT(), loader(2, 3))
    return found


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("", {"static_graph": False, "bucket_cap_mb": 25, "gradient_as_bucket_view": True}),
        ("static_graph=true", {"static_graph": True}),
        ("bucket_cap_mb=3,gradient_as_bucket_view=false", {"bucket_cap_mb": 3, "gradient_as_bucket_view": False}),
        ("find_unused_parameters=true", {"find_unused_parameters": True}),
        ("comm_hook=powersgd,powersgd_rank=3", {"powersgd_rank": 3}),
        ("comm_hook=powersgd", {"powersgd_rank": 4}),
    ],
)
@pytest.mark.parametrize("name", ["ddp_custom", "zero1_custom"])
def test_options_of_ddp(ranks: Any, name: str, options: str, expected: dict[str, Any]) -> None:
    for found in ranks(2).run(as_wrapped, f"{name}:{options}"):
        assert {key: found[key] for key in expected} == expected


# Methods that gather ----------------------------------------------------------------------------------------------


class Scored(ByteGPT):
    """A hook calls a method of its own that reads weights of the module's unit."""

    def __init__(self) -> None:
        super().__init__()
        self.scores: list[float] = []

    def score(self) -> Tensor:
        tokens = torch.arange(LENGTH)[None]
        return (self.model.tokens.weight[tokens] @ self.model.head.weight.t()).logsumexp(-1).mean()

    def on_train_batch_end(self, *args: Any) -> None:
        with torch.no_grad():
            self.scores.append(float(self.score()))


def scores(strategy: str, num_ranks: int) -> list[float]:
    L.seed_everything(3, verbose=False)
    trainer_for(strategy, num_ranks).fit(module := Scored(), loader(num_ranks))
    return module.scores


def test_methods_that_are_named_gather_parameters(ranks: Any) -> None:
    expected = scores("auto", 1)
    assert len(set(expected)) == len(expected)
    named = ("fsdp_custom:forward_methods=score", "hsdp_custom:shard=2,forward_methods=[score]")
    for strategy in (*named, "fsdp_custom"):  # without, single parameters are gathered
        size = 4 if strategy.startswith("hsdp_custom") else 2
        for found in ranks(size).run(scores, strategy, size):
            assert found == pytest.approx(expected, abs=TOLERANCE)


# Dtypes -----------------------------------------------------------------------------------------------------------


class Table(nn.Module):
    """A table that is no parameter, and the dtypes in which its forward has seen it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.full((4,), 1 / 3))
        self.seen: set[torch.dtype] = set()

    def forward(self) -> Tensor:
        self.seen.add(self.table.dtype)
        return self.table.float().sum()


class Tabled(ByteGPT):
    def __init__(self) -> None:
        super().__init__()
        self.table = Table()

    def loss(self, tokens: Tensor) -> Tensor:
        return super().loss(tokens) * self.table()


def dtypes(strategy: str, precision: str) -> dict[str, Any]:
    """Of what layers are given, and of a buffer as forward sees it and as it is afterwards."""
    given: set[torch.dtype] = set()

    def note(module: nn.Module, args: Any) -> None:
        if isinstance(module, Block) and isinstance(args[0], Tensor):
            given.add(args[0].dtype)

    handle = nn.modules.module.register_module_forward_pre_hook(note)
    module = Tabled()
    try:
        trainer_for(strategy, 2, precision=precision).fit(module, loader(2, 2))
    finally:
        handle.remove()
    return {"given": given, "seen": module.table.seen, "kept": module.table.table.dtype}


@pytest.mark.parametrize("name", ["fsdp_custom", "zero2_custom"])
def test_dtypes_of_a_policy_of_ones_own(ranks: Any, name: str) -> None:
    half, whole = torch.bfloat16, torch.float32
    found = ranks(2).run(dtypes, f"{name}:precision_policy={{param: bfloat16, buffer: bfloat16}}", "bf16-mixed")[0]
    assert found == {"given": {half}, "seen": {half}, "kept": whole}
    found = ranks(2).run(dtypes, f"{name}:precision_policy={{output: bfloat16}}", "bf16-mixed")[0]
    assert found == {"given": {half, whole}, "seen": {whole}, "kept": whole}  # the first layer is given embeddings

"""Pipeline parallel: each rank some of the layers, and numbers equal to those of one process."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_parallel import ConfigurationError, build_strategy, full_state_dict
from tests.cases import CASES, GPT, VOCABULARY, ByteGPT, Case, data_of, next_token_loss
from tests.collectives import Collectives
from tests.parity import GLOBAL_BATCH, STEPS, TOLERANCE, Outcome, Recorder, is_moving, make_trainer, worst
from tests.test_context import MODULES as OF_CONTEXT
from tests.test_context import Llama, batches


class Deep(ByteGPT):
    """Four layers."""

    def __init__(self, optimizer: str = "adamw", depth: int = 4) -> None:
        super().__init__(optimizer)
        self.model = GPT(depth=depth)


class DeepTied(Deep):
    """Embedding and head are one parameter, on the first and on the last stage."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.model.head.weight = self.model.tokens.weight


class HeadFirst(Case):
    """Everything is registered in another order than it is called; a parameter is read without its module."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        gpt = GPT(depth=4)
        self.norm, self.head, self.blocks, self.tokens = gpt.norm, gpt.head, gpt.blocks, gpt.tokens
        self.middle = nn.Parameter(torch.randn(16))

    def loss(self, tokens: Tensor) -> Tensor:
        hidden = self.tokens(tokens)
        for index, block in enumerate(self.blocks):
            hidden = block(hidden)
            if index == 1:  # between the last layer of a stage and the first of the next
                hidden = hidden * 1.5 + self.middle
        return next_token_loss(self.head(self.norm(hidden)), tokens)


class ReadsValues(Deep):
    """Looks at the loss, draws a branch from it, and keeps state on the module."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        logits = self(batch[0])
        loss = next_token_loss(logits, batch[0])
        self.seen.append(loss.item())
        self.log("train_loss", loss)
        return {"loss": loss, "logits": logits.detach(), "count": 3}


MODULES: dict[str, type[Case]] = {
    **{name: cls for name, cls in OF_CONTEXT.items() if name not in ("two_lengths", "encoder_decoder", "one_key_head")},
    "deep": Deep,
    "deep_tied": DeepTied,
    "head_first": HeadFirst,
    "reads_values": ReadsValues,
}
_references: dict[Any, Outcome] = {}


def train(
    case: str, strategy: str, num_ranks: int, num_readers: int, optimizer: str = "adamw", **kwargs: Any
) -> Outcome:
    """Five steps of one module; `num_readers` ranks read different samples."""
    L.seed_everything(3, verbose=False)
    recorder = Recorder()
    built = strategy if strategy == "auto" else build_strategy(strategy)
    kwargs = {"gradient_clip_val": 0.5, **kwargs}
    trainer = make_trainer(built, num_ranks, callbacks=[recorder], **kwargs)
    trainer.fit(MODULES[case](optimizer), batches(case, num_readers))
    recorder.outcome.final = full_state_dict(trainer)
    return recorder.outcome


def reference(case: str, optimizer: str = "adamw", **kwargs: Any) -> Outcome:
    """One process, once a session."""
    key = (case, optimizer, *kwargs.items())
    if key not in _references:
        _references[key] = train(case, "auto", 1, 1, optimizer, **kwargs)
        assert is_moving(_references[key])
    return _references[key]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("case", MODULES)
def test_layers_over_two_ranks(ranks: Any, case: str, optimizer: str) -> None:
    ours = ranks(2).run(train, case, "pp_custom", 2, 1, optimizer)[0]
    difference = worst(ours, reference(case, optimizer))
    print(f"{case} {optimizer}: {difference:.1e}")
    assert difference < TOLERANCE


@pytest.mark.parametrize(
    ("strategy", "readers"),
    [
        ("pp_custom", 1),
        ("fsdp_custom:pipeline=2", 2),
        ("zero2_custom:pipeline=2", 2),
        ("fsdp_custom:pipeline=2,replicate=2", 2),
        ("fsdp_custom:pipeline=2,schedule=interleaved,virtual_stages=2", 2),
        ("fsdp_custom:pipeline=2,schedule=zbv", 2),
        ("fsdp_custom:pipeline=2,stages=[1,3],recompute=full,schedule=gpipe", 2),
    ],
)
@pytest.mark.parametrize("case", ["deep_tied", "head_first"])
def test_products(ranks: Any, case: str, strategy: str, readers: int) -> None:
    difference = worst(ranks(4).run(train, case, strategy, 4, readers)[0], reference(case))
    print(f"{case} {strategy}: {difference:.1e}")
    assert difference < TOLERANCE


@pytest.mark.parametrize(
    "options",
    [
        "schedule=gpipe",
        "schedule=gpipe,microbatches=2",
        "schedule=1f1b,microbatches=8",
        "schedule=interleaved,virtual_stages=2",
        "schedule=zbv",
        "schedule=dualpipev",
        "stages=[3,1]",
        "recompute=selective",
        "reshard=never",
    ],
)
def test_schedules(ranks: Any, options: str) -> None:
    difference = worst(ranks(2).run(train, "deep_tied", f"pp_custom:{options}", 2, 1)[0], reference("deep_tied"))
    print(f"{options}: {difference:.1e}")
    assert difference < TOLERANCE

"""Parameters that steps leave without a gradient under DDP: found in the first step, or refused by name."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_parallel import full_state_dict
from tests.data import GLOBAL_BATCH
from tests.models.cases import GPT, LENGTH, VOCABULARY, Case, next_token_loss
from tests.parity import TOLERANCE, Outcome, Recorder, is_moving, once, trainer_for, worst
from tests.rank_pool import RankError

ALL = (0, 1, 2, 3)
USES: dict[str, tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]] = {
    "all": ((ALL, ALL),),
    "two that nobody uses": ((ALL[:2], ALL[:2]),),
    "each rank its own": (((0,), (1,)),),
    "one rank all": ((ALL, (0,)),),
    "by turns": (((0,), (1,)), ((2,), (2,))),
    "late": ((ALL, ALL), (ALL, ALL), (ALL, (3,))),
}
"""For each step, over and over: which heads even samples use, and which odd ones. One of two ranks reads each kind."""


class Heads(Case):
    def __init__(self, uses: str) -> None:
        super().__init__("adamw")
        self.model = GPT()
        self.heads = nn.ModuleList(nn.Linear(VOCABULARY, VOCABULARY) for _ in ALL)
        self.uses = USES[uses]
        self.without: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        uses = self.uses[batch_idx % len(self.uses)]
        logits = self.model(batch[0])
        losses = []
        for row, tokens in zip(logits, batch[0], strict=True):
            row = sum((self.heads[head](row) for head in uses[int(tokens[0])]), start=row)
            losses.append(next_token_loss(row[None], tokens[None]))
        return torch.stack(losses).mean()

    def on_after_backward(self) -> None:
        self.without.append(sum(p.grad is None for p in self.parameters()))
        self.trainer.strategy.barrier()  # ranks meet here, whatever they have used

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4, weight_decay=0.5)


class Looks(Callback):
    """Whether DDP looked for unused parameters, in each step."""

    def __init__(self) -> None:
        self.seen: list[bool] = []

    def on_before_optimizer_step(self, trainer: L.Trainer, *args: Any) -> None:
        self.seen.append(getattr(trainer.strategy.model, "find_unused_parameters", False))


def fitted(
    make: Any, strategy: str, num_ranks: int, steps: int = 4, **kwargs: Any
) -> tuple[Outcome, list[bool], list[int]]:
    L.seed_everything(3, verbose=False)
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, VOCABULARY, (GLOBAL_BATCH * steps, LENGTH), generator=generator)
    tokens[:, 0] = torch.arange(len(tokens)) % 2
    module, recorder, looks = make(), Recorder(), Looks()
    trainer = trainer_for(strategy, num_ranks, callbacks=[recorder, looks], **kwargs)
    trainer.fit(module, DataLoader(TensorDataset(tokens), batch_size=GLOBAL_BATCH // num_ranks))
    recorder.outcome.final = full_state_dict(trainer)
    return recorder.outcome, looks.seen, module.without


@pytest.mark.parametrize("options", ["", "comm_hook=fp16", "gradient_as_bucket_view=false", "check=first_step"])
@pytest.mark.parametrize("name", ["ddp_custom", "zero1_custom"])
@pytest.mark.parametrize("uses", ["two that nobody uses", "each rank its own", "one rank all"])
def test_the_first_step_decides(ranks: Any, name: str, options: str, uses: str) -> None:
    expected, _, without = once(fitted, partial(Heads, uses), "auto", 1)
    assert is_moving(expected)
    (ours, looks, ours_without), (_, others, others_without) = ranks(2).run(
        fitted, partial(Heads, uses), f"{name}:{options}", 2
    )
    assert looks == others == [False, True, True, True]
    assert without == ours_without == others_without
    if "fp16" not in options:  # which rounds
        assert worst(ours, expected) <= TOLERANCE


def test_no_step_looks_where_the_first_one_uses_all(ranks: Any) -> None:
    expected, _, _ = once(fitted, partial(Heads, "all"), "auto", 1)
    ours, looks, without = ranks(2).run(fitted, partial(Heads, "all"), "ddp_custom", 2)[0]
    assert looks == [False] * 4
    assert without == [0] * 4
    assert worst(ours, expected) <= TOLERANCE


@pytest.mark.parametrize("options", ["", "accumulation_sync=every"])
@pytest.mark.parametrize("uses", ["by turns", "each rank its own"])
def test_a_window_decides_by_its_last_microstep(ranks: Any, uses: str, options: str) -> None:
    """Gradients of the microsteps before count, though the last one leaves these parameters out."""
    kwargs = {"steps": 6, "accumulate_grad_batches": 2}
    expected, _, _ = once(fitted, partial(Heads, uses), "auto", 1, **kwargs)
    found = ranks(2).run(fitted, partial(Heads, uses), f"ddp_custom:{options}", 2, **kwargs)
    for ours, looks, _ in found:
        assert looks[1:] == [True, True]
        assert ours is found[1][0] or worst(ours, expected) <= TOLERANCE


@pytest.mark.parametrize(
    ("strategy", "uses", "words"),
    [
        ("ddp_custom", "late", "The first step has used all, so 'auto' does not look"),
        ("zero1_custom:find_unused_parameters=false", "two that nobody uses", "Give find_unused_parameters=true"),
    ],
)
def test_a_step_that_leaves_some_is_refused_before_its_update(ranks: Any, strategy: str, uses: str, words: str) -> None:
    with pytest.raises(RankError) as caught:
        ranks(2).run(fitted, partial(Heads, uses), strategy, 2, deadline=60)
    text = str(caught.value)
    first = text[text.index("ConfigurationError: ") :].splitlines()[0]
    number, names = (6, "heads.0.weight, heads.0.bias") if uses == "late" else (4, "heads.2.weight, heads.2.bias")
    assert f"this step leaves {number} trainable parameters ({names}" in first
    assert words in first


class AlsoReturns(Heads):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return {"loss": loss, "other": self.heads[3](self.model(batch[0]))}


def test_what_a_step_returns_besides_its_loss_is_no_use(ranks: Any) -> None:
    make = partial(AlsoReturns, "two that nobody uses")
    expected, _, _ = once(fitted, make, "auto", 1)
    ours, looks, _ = ranks(2).run(fitted, make, "ddp_custom", 2)[0]
    assert looks == [False, True, True, True]
    assert worst(ours, expected) <= TOLERANCE


def test_static_graph_sees_what_the_first_step_leaves(ranks: Any) -> None:
    make = partial(Heads, "two that nobody uses")
    expected, _, _ = once(fitted, make, "auto", 1)
    ours, looks, _ = ranks(2).run(fitted, make, "ddp_custom:static_graph=true", 2)[0]
    assert looks == [False] * 4
    assert worst(ours, expected) <= TOLERANCE


class Thawed(Heads):
    """Trains one more head from the third step on, and another one that no step uses."""

    def __init__(self) -> None:
        super().__init__("all")
        self.uses = (((0, 1), (0, 1)),)
        self.heads[1:].requires_grad_(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.heads[1:3].requires_grad_(True)


def test_it_looks_again_where_other_parameters_train(ranks: Any) -> None:
    expected, _, _ = once(fitted, Thawed, "auto", 1)
    ours, looks, _ = ranks(2).run(fitted, Thawed, "ddp_custom", 2)[0]
    assert looks == [False, False, False, True]
    assert worst(ours, expected) <= TOLERANCE

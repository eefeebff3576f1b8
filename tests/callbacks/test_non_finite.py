"""`NonFinite`: a step with a NaN on one rank leaves all ranks as a run in which its batches are left out."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from lightning_parallel import ConfigurationError, full_state_dict
from lightning_parallel.callbacks import ExponentialMovingAverage, GradientNorm, NonFinite, TokenWeighted
from tests.data import GLOBAL_BATCH, STEPS, data_of, loader
from tests.models.cases import ByteGPT
from tests.models.not_numbers import BATCH, NoNumber
from tests.names import num_ranks, num_readers
from tests.parity import TOLERANCE, checked, difference, once, trainer_for

Result = dict[str, Any]


class Decaying(NoNumber):
    """Its loss is NaN for one sample of batch 1; weight decay is large, so that an update without gradients shows."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4, weight_decay=0.5)


class OneElement(Decaying):
    """In batch 1 the loss is finite, and one element of a gradient is not: one rank of several has it."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx != BATCH or self.trainer.num_training_batches < STEPS:  # that batch is left out
            return self.loss(*batch)
        logits = self.model.head(torch.ones(1, 16))
        logits.register_hook(lambda gradient: torch.where(torch.arange(gradient.shape[1])[None] == 0, torch.inf, 0.0))
        return self.loss(*batch) + (logits - logits.detach()).sum()


def fitted(
    strategy: str, size: int, left_out: int = 0, *, make: Any = Decaying, average: bool = False, **kwargs: Any
) -> Result:
    """Five batches, of which the first, or that with the NaN, may be left out; in one process with ``"auto"``.

    Args:
        strategy: Its name and options; the first step is compared only if they say so.
        size: The number of ranks.
        left_out: How many batches up to that with the NaN are left out.
        make: Makes the module.
        average: Whether an average of the weights is kept.
        kwargs: Of the Trainer.
    """
    L.seed_everything(3, verbose=False)
    readers = num_readers(strategy.partition(":")[0], size)
    data = data_of("byte_gpt", STEPS * GLOBAL_BATCH, GLOBAL_BATCH)
    out = range((BATCH + 1 - left_out) * GLOBAL_BATCH, (BATCH + 1) * GLOBAL_BATCH)
    batches = DataLoader(Subset(data, [i for i in range(len(data)) if i not in out]), GLOBAL_BATCH // readers)
    skips, ema = NonFinite(), ExponentialMovingAverage(0.7)
    callbacks = [skips, GradientNorm(), *([ema] if average else [])]
    trainer = trainer_for(strategy, size, callbacks=callbacks, gradient_clip_val=0.5, **kwargs)
    trainer.fit(make(), batches)
    return {
        "weights": full_state_dict(trainer),
        "average": ema.full_state_dict(trainer) if average else {},
        "skipped": skips.num_skipped,
        "logged": float(trainer.callback_metrics["non_finite_steps"]),
        "steps": trainer.global_step,
    }


def assert_left_out(found: Result, left_out: int, **kwargs: Any) -> None:
    without = once(fitted, "auto", 1, left_out, **kwargs)
    in_one_process = once(fitted, "auto", 1, **kwargs)
    assert without["skipped"] == 0
    assert found["skipped"] == found["logged"] == in_one_process["skipped"] == 1
    assert found["steps"] == in_one_process["steps"] == without["steps"] + 1
    for name in ("weights", "average") if kwargs.get("average") else ("weights",):
        assert difference(in_one_process[name], without[name]) == 0
        assert difference(found[name], without[name]) < TOLERANCE


@pytest.mark.parametrize(
    ("strategy", "accumulate"),
    [
        ("ddp_custom", 2),
        ("zero1_custom", 1),
        ("fsdp_custom", 2),
        ("tp_custom", 1),
        ("cp_custom", 2),
        ("pp_custom", 2),
        ("hsdp_custom:offload=optimizer", 1),
        ("fsdp_tp_custom", 2),
    ],
)
def test_a_nan_on_one_rank_is_a_step_left_out(ranks: Any, strategy: str, accumulate: int) -> None:
    size = num_ranks(strategy.partition(":")[0])
    kwargs = {"accumulate_grad_batches": accumulate, "average": strategy in ("zero1_custom", "fsdp_custom")}
    found = ranks(size).run(fitted, strategy, size, **kwargs)
    assert {each["skipped"] for each in found} == {1}
    assert_left_out(found[0], accumulate, **kwargs)


def test_an_element_of_one_shard(ranks: Any) -> None:
    """The other rank's shards are finite, and its losses are."""
    found = ranks(2).run(fitted, "fsdp_custom", 2, make=OneElement)
    assert {each["skipped"] for each in found} == {1}
    assert_left_out(found[0], 1, make=OneElement)


def test_a_nan_in_the_step_that_is_compared(ranks: Any) -> None:
    """The first window has it, and is the same as in one process: NaN in both."""
    found = ranks(2).run(fitted, checked("fsdp_custom"), 2, accumulate_grad_batches=2)[0]
    assert_left_out(found, 2, accumulate_grad_batches=2)


# What counts, and what is skipped -----------------------------------------------------------------------------------


class Planted(ByteGPT):
    """In batch 1 the gradients or the loss are not finite."""

    def __init__(self, what: str = "", make: Any = None) -> None:
        super().__init__("adamw")
        self.what, self.make, self.seen = what, make, list[Any]()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(*batch)
        if batch_idx == 1 and self.what == "gradient":
            self.model.head.weight.register_hook(lambda gradient: gradient * torch.inf)
        if batch_idx == 1 and self.what == "loss":
            loss = loss + torch.tensor(torch.inf)
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen.append(all(p.grad is not None for p in self.parameters()))

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.seen.append(all(p.grad is not None for p in self.parameters()))

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters()) if self.make else super().configure_optimizers()


def planted(what: str, make: Any = None, **kwargs: Any) -> tuple[NonFinite, Any, L.Trainer]:
    """Two batches in one process."""
    L.seed_everything(3, verbose=False)
    module, skips = Planted(what, make), NonFinite()
    trainer = trainer_for("auto", 1, callbacks=[skips], **kwargs)
    trainer.fit(module, loader(1, 2))
    return skips, module, trainer


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.5, fused=True),
        lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.5, foreach=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.5),
        torch.optim.Adafactor,
    ],
    ids=["fused", "foreach", "sgd", "adafactor"],
)
@pytest.mark.parametrize("what", ["gradient", "loss"])
def test_weights_and_states_of_an_optimizer_stay(make: Any, what: str) -> None:
    """As after the first batch; hooks find the gradients."""
    skips, module, trainer = planted(what, make)
    _, other, shorter = planted("", make, limit_train_batches=1)
    assert skips.num_skipped == 1
    assert difference(module.state_dict(), other.state_dict()) == 0
    (ours,), (theirs,) = (each.optimizers for each in (trainer, shorter))
    states = [list(each.state_dict()["state"].values()) for each in (ours, theirs)]
    torch.testing.assert_close(*states, rtol=0, atol=0)
    assert module.seen == [False, True, True, True]  # before the first backward there are none


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize(("what", "num_skipped"), [("gradient", 0), ("loss", 1)])
def test_a_loss_scaler_skips_for_itself(is_fused: bool, what: str, num_skipped: int) -> None:
    """Overflowed gradients are its own to skip, so that they are not counted; a loss that is not finite is."""
    make = lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-4, weight_decay=0.5, fused=is_fused)  # noqa: E731
    results = []
    for kwargs in ({}, {"limit_train_batches": 1}):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
        skips, module, _ = planted(what, make, plugins=[MixedPrecision("16-mixed", "cpu", scaler)], **kwargs)
        results.append((module.state_dict(), skips.num_skipped))
    assert difference(results[0][0], results[1][0]) == 0
    assert [number for _, number in results] == [num_skipped, 0]


def test_large_gradients_in_16_bits_are_finite() -> None:
    """Their norm is not, in 16 bits."""
    make = lambda p: torch.optim.SGD(p, lr=0.0)  # noqa: E731

    class Steep(Planted):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            weight = self.model.head.weight
            return (weight - weight.detach()).sum() * 60_000.0

    L.seed_everything(3, verbose=False)
    trainer = trainer_for("auto", 1, callbacks=[skips := NonFinite()], precision="16-true")
    trainer.fit(Steep("", make), loader(1, 2))
    assert skips.num_skipped == 0


class TwoNetworks(L.LightningModule):
    """Two optimizers, of which the first one's loss is NaN in batch 1."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.networks = torch.nn.ModuleList(torch.nn.Linear(2, 1) for _ in range(2))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for number, optimizer in enumerate(self.optimizers()):
            optimizer.zero_grad()
            loss = self.networks[number](torch.ones(2)).sum()
            self.manual_backward(loss * (torch.nan if (number, batch_idx) == (0, 1) else 1.0))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(network.parameters()) for network in self.networks]


def test_only_the_optimizer_with_the_nan_skips() -> None:
    L.seed_everything(3, verbose=False)
    trainer = trainer_for("auto", 1, callbacks=[skips := NonFinite()])
    trainer.fit(TwoNetworks(), loader(1, 3))
    counts = [{float(state["step"]) for state in each.state.values()} for each in trainer.optimizers]
    assert counts == [{2.0}, {3.0}]
    assert skips.num_skipped == 1
    assert not skips.has_skipped_batch


class Ragged(ByteGPT):
    """Batch 1 has no valid label, so that its loss is a mean over nothing."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        labels = torch.full_like(batch[0], -100) if batch_idx == 1 else batch[0]
        return torch.nn.functional.cross_entropy(self(batch[0]).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("is_weighted", [True, False])
def test_a_mean_over_no_token_that_weighs_nothing_is_no_reason(is_weighted: bool) -> None:
    L.seed_everything(3, verbose=False)
    callbacks = [skips := NonFinite(), *([TokenWeighted()] if is_weighted else [])]
    trainer = trainer_for("auto", 1, callbacks=callbacks, accumulate_grad_batches=2)
    trainer.fit(Ragged("adamw"), loader(1, 4))
    assert skips.num_skipped == (0 if is_weighted else 1)


# Refusals -----------------------------------------------------------------------------------------------------------


def test_no_number_of_updates() -> None:
    with pytest.raises(ConfigurationError, match="max_consecutive=0 is no number of skipped updates; give 1 or more"):
        NonFinite(0)


def test_lbfgs_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="LBFGS looks at several losses in one"):
        planted("", torch.optim.LBFGS)


def test_updates_in_backward_are_refused(ranks: Any) -> None:
    words = ranks(2).run(refused)
    assert "NonFinite skips an update when all gradients are there, but optimizer_in_backward=True makes it" in words[0]
    assert words[1] == "refused; rank 0 says why"


def refused() -> str:
    trainer = trainer_for("fsdp_custom:optimizer_in_backward=true", 2, callbacks=[NonFinite()])
    with pytest.raises(ConfigurationError) as caught:
        trainer.fit(ByteGPT("adamw"), loader(2))
    return str(caught.value)

"""Gradients of several microsteps: when they are reduced, and equal to those of one large batch."""

from __future__ import annotations

from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler
from torch import Tensor, nn

from lightning_parallel import _torch, full_state_dict
from tests.collectives import collectives_of_a_window
from tests.data import loader, loader_of
from tests.models.cases import CASES, GPT, Block, ByteGPT, Case, next_token_loss
from tests.parity import BF16, TOLERANCE, Recorder, difference, once, trainer_for
from tests.rank_pool import RankError

# Over copies once a window, where torch reduces zeros for unused parameters by itself.
OVER_COPIES = 4 if _torch.fsdp.CAN_REDUCE_UNUSED else 4 * 4


@pytest.mark.parametrize(
    ("strategy", "size", "reduces", "all_reduces"),
    [
        # Three layers and the root. A byte a parameter is agreed on where gradients are reduced.
        ("fsdp_custom:accumulation_sync=every", 2, 4 * 4, 4),
        ("fsdp_custom:accumulation_sync=last", 2, 4, 1),
        ("fsdp_custom", 2, 4, 1),  # auto: these few gradients fit
        ("zero2_custom:accumulation_sync=last", 2, 4, 1),
        ("hsdp_custom:accumulation_sync=every", 4, 4 * 4, OVER_COPIES + 4),
        ("hsdp_custom:accumulation_sync=last", 4, 4, 4 + 1),
        ("ddp_custom:accumulation_sync=every", 2, 0, None),
    ],
)
def test_reductions_of_a_window_of_four(ranks: Any, strategy: str, size: int, reduces: int, all_reduces: Any) -> None:
    counts = ranks(size).run(collectives_of_a_window, strategy, 4)[0]
    assert counts.number("reduce_scatter") == reduces, counts
    assert all_reduces is None or counts.number("all_reduce") == all_reduces, counts


class Clamping(ByteGPT):
    """Changes gradients behind each backward, in a way that is not linear."""

    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5).clamp_(-0.02, 0.02)


class ClampingCallback(Callback):
    """Does it for the module."""

    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        Clamping.on_after_backward(pl_module)  # type: ignore[arg-type]


def clamped(strategy: str, num_ranks: int, readers: int, *, by_callback: bool = False) -> dict[str, Any]:
    """Three windows of two microsteps."""
    L.seed_everything(3, verbose=False)
    callbacks = [ClampingCallback()] if by_callback else []
    trainer = trainer_for(strategy, num_ranks, accumulate_grad_batches=2, callbacks=callbacks)
    trainer.fit((ByteGPT if by_callback else Clamping)("adamw"), loader(readers, 6))
    return full_state_dict(trainer)


@pytest.mark.parametrize(
    ("strategy", "size", "readers"),
    [
        *((name, 2, 2) for name in ("ddp_custom", "zero1_custom", "zero2_custom", "fsdp_custom")),
        *((name, 2, 1) for name in ("tp_custom", "cp_custom", "pp_custom")),
        ("hsdp_custom", 4, 4),
    ],
)
@pytest.mark.parametrize("by_callback", [False, True], ids=["module", "callback"])
def test_hooks_change_the_gradients_of_one_process(
    ranks: Any, strategy: str, size: int, readers: int, by_callback: bool
) -> None:
    expected = once(clamped, "auto", 1, 1)
    found = ranks(size).run(clamped, strategy, size, readers, by_callback=by_callback)[0]
    assert difference(found, expected) < TOLERANCE


def windows(strategy: str, num_ranks: int, kind: str) -> dict[str, Any]:
    """Two epochs of seven microsteps under one kind of accumulation."""
    L.seed_everything(3, verbose=False)
    module: Any = Manual("adamw") if kind == "manual" else CASES["bare_parameter"]("adamw")
    options: dict[str, Any] = {"max_epochs": 2}
    if kind == "int":
        options["accumulate_grad_batches"] = 3
    if kind == "scheduler":
        options["callbacks"] = [GradientAccumulationScheduler({0: 2, 1: 3})]
    if kind != "manual":
        options["gradient_clip_val"] = 0.5
    trainer = trainer_for(strategy, num_ranks, **options)
    trainer.fit(module, loader(num_ranks, 7))
    return full_state_dict(trainer)


class Manual(CASES["bare_parameter"]):  # type: ignore[misc]
    """Accumulates by hand, and says which backward is the last."""

    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        is_last = batch_idx % 3 == 2 or batch_idx == 6
        with optimizer.toggle_model(sync_grad=is_last):
            self.manual_backward(self.loss(*batch) / 3)
        if is_last:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("kind", ["int", "scheduler", "manual"])
@pytest.mark.parametrize("mode", ["every", "last", "auto"])
@pytest.mark.parametrize("name", ["ddp_custom", "zero1_custom", "fsdp_custom", "hsdp_custom"])
def test_every_way_to_accumulate(ranks: Any, name: str, mode: str, kind: str) -> None:
    size = 4 if name == "hsdp_custom" else 2
    ours = ranks(size).run(windows, f"{name}:accumulation_sync={mode}", size, kind)[0]
    assert difference(ours, once(windows, "auto", 1, kind)) < TOLERANCE


def big_batch(strategy: str, num_ranks: int, accumulate: int) -> dict[str, Any]:
    L.seed_everything(3, verbose=False)
    trainer = trainer_for(strategy, num_ranks, accumulate_grad_batches=accumulate)
    trainer.fit(
        ByteGPT("adamw"),
        loader_of("byte_gpt", steps=4 * accumulate, global_batch=16 // accumulate, num_ranks=num_ranks),
    )
    return full_state_dict(trainer)


@pytest.mark.parametrize("mode", ["every", "last"])
def test_a_window_equals_one_big_batch(ranks: Any, mode: str) -> None:
    ours = ranks(2).run(big_batch, f"fsdp_custom:accumulation_sync={mode}", 2, 4)[0]
    assert difference(ours, once(big_batch, "auto", 1, 1)) < TOLERANCE


class NeverSynchronizes(Manual):
    """Steps after a backward that was said not to be the last: Lightning's DDP strategy lets the ranks drift apart."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        with optimizer.toggle_model(sync_grad=False):
            self.manual_backward(self.loss(*batch) / 2)
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()


def never_synchronized(strategy: str, num_ranks: int) -> dict[str, Any]:
    L.seed_everything(3, verbose=False)
    trainer_for(strategy, num_ranks).fit(module := NeverSynchronizes("sgd"), loader(num_ranks, 6))
    return module.state_dict()


@pytest.mark.parametrize("name", ["ddp_custom", "zero1_custom", "fsdp_custom", "zero2_custom", "hsdp_custom"])
def test_a_step_without_a_last_microstep(ranks: Any, name: str) -> None:
    size = 4 if name == "hsdp_custom" else 2
    strategy = name if name in ("ddp_custom", "zero1_custom") else f"{name}:accumulation_sync=last"
    expected = once(never_synchronized, "auto", 1)
    for ours in ranks(size).run(never_synchronized, strategy, size):
        assert difference(ours, expected) < TOLERANCE


class HoldsOne(CASES["gan"]):  # type: ignore[misc]
    """The generator's window is two batches, of which none is said to be the last; the discriminator's is one."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        noise, real = batch
        generate, discriminate = self.optimizers()
        with generate.toggle_model(sync_grad=False):
            self.manual_backward(F.softplus(-self.discriminator(self.generator(noise) + self.shift)).mean())
        with discriminate.toggle_model():
            fake = (self.generator(noise) + self.shift).detach()
            loss = F.softplus(-self.discriminator(real)).mean() + F.softplus(self.discriminator(fake)).mean()
            self.manual_backward(loss)
        discriminate.step()
        discriminate.zero_grad()
        if batch_idx % 2:
            generate.step()
            generate.zero_grad()


def hold_one(strategy: str, num_ranks: int) -> dict[str, Any]:
    L.seed_everything(3, verbose=False)
    trainer = trainer_for(strategy, num_ranks)
    trainer.fit(HoldsOne("adamw"), loader(num_ranks, 6, "gan"))
    return full_state_dict(trainer)


@pytest.mark.parametrize("mode", ["every", "last"])
@pytest.mark.parametrize("name", ["ddp_custom", "zero1_custom", "fsdp_custom", "zero2_custom", "hsdp_custom"])
def test_one_optimizer_holds_while_the_other_steps(ranks: Any, name: str, mode: str) -> None:
    size = 4 if name == "hsdp_custom" else 2
    ours = ranks(size).run(hold_one, f"{name}:accumulation_sync={mode}", size)[0]
    assert difference(ours, once(hold_one, "auto", 1)) < TOLERANCE


class Alternating(Case):
    """Two networks in alternate batches under manual optimization, updated every second batch by one optimizer."""

    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer)
        self.automatic_optimization = False
        self.first, self.second, self.third = GPT(), GPT(depth=2), nn.Linear(4, 4)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        network = self.second if batch_idx % 2 else self.first
        self.manual_backward(next_token_loss(network(batch[0]), batch[0]))
        if batch_idx % 2:
            self.optimizers().step()
            self.optimizers().zero_grad()


class AccumulatingGAN(CASES["gan"]):  # type: ignore[misc]
    """Each optimizer is toggled, and steps every second batch."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        noise, real = batch
        generate, discriminate = self.optimizers()
        for optimizer in (discriminate, generate):
            self.toggle_optimizer(optimizer)
            fake = self.discriminator(self.generator(noise) + self.shift)
            loss = F.softplus(-fake if optimizer is generate else fake).mean()
            if optimizer is discriminate:
                loss = loss + F.softplus(-self.discriminator(real)).mean()
            self.manual_backward(loss / 2)
            if batch_idx % 2:
                optimizer.step()
                optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)


class FrozenInTheMiddle(ByteGPT):
    """A layer is frozen between two microsteps of a window."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.model.blocks[1].requires_grad_(batch_idx not in (1, 3))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4)


class LateLayer(ByteGPT):
    """A layer that runs in the second window only."""

    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer)
        self.late = nn.ModuleList(Block() for _ in range(2))
        self.seen = 0

    def loss(self, tokens: Tensor) -> Tensor:
        self.seen += 1
        x = self.model.tokens(tokens)
        for block in [*self.model.blocks, *(self.late if self.seen > 2 else ())]:
            x = block(x)
        return next_token_loss(self.model.head(x), tokens)


FOUND: dict[str, tuple[Any, dict[str, Any], tuple[str, ...]]] = {
    "alternating": (Alternating, {}, ("ddp_custom:find_unused_parameters=true", "fsdp_custom", "zero2_custom")),
    "accumulating_gan": (AccumulatingGAN, {}, ("ddp_custom", "fsdp_custom", "zero2_custom", "hsdp_custom")),
    "frozen": (
        FrozenInTheMiddle,
        {"accumulate_grad_batches": 2},
        ("ddp_custom", "zero1_custom", "fsdp_custom", "hsdp_custom:accumulation_sync=last"),
    ),
}


def fit_found(name: str, strategy: str, num_ranks: int) -> dict[str, Any]:
    L.seed_everything(3, verbose=False)
    make, options, _ = FOUND[name]
    trainer = trainer_for(strategy, num_ranks, **options)
    trainer.fit(make("adamw"), loader(num_ranks, 6, "gan" if "gan" in name else "byte_gpt"))
    return full_state_dict(trainer)


@pytest.mark.parametrize(("name", "strategy"), [(name, each) for name in FOUND for each in FOUND[name][2]])
def test_windows_of_unusual_steps(ranks: Any, name: str, strategy: str) -> None:
    size = 4 if strategy.startswith("hsdp_custom") else 2
    assert difference(ranks(size).run(fit_found, name, strategy, size)[0], once(fit_found, name, "auto", 1)) < TOLERANCE


@pytest.mark.skipif(not _torch.fsdp.CAN_REDUCE_UNUSED, reason="copies are averaged in each microstep before torch 2.13")
@pytest.mark.parametrize("mode", ["auto", "every"])
def test_freezing_in_the_middle_of_a_hybrid_window_is_refused(ranks: Any, mode: str) -> None:
    with pytest.raises(RankError, match="frozen or thawed between two microsteps"):
        ranks(4).run(fit_found, "frozen", f"hsdp_custom:accumulation_sync={mode}", 4)


def late_layer(strategy: str, num_ranks: int) -> list[float]:
    L.seed_everything(3, verbose=False)
    recorder = Recorder()
    options = {"callbacks": [recorder], "accumulate_grad_batches": 2, "precision": "bf16-mixed"}
    trainer_for(strategy, num_ranks, **options).fit(LateLayer("sgd"), loader(num_ranks, 6))
    return recorder.outcome.losses


@pytest.mark.parametrize("name", ["fsdp_custom", "hsdp_custom"])
def test_a_layer_that_has_not_run_holds_nothing(ranks: Any, name: str) -> None:
    size = 4 if name == "hsdp_custom" else 2
    ours = ranks(size).run(late_layer, f"{name}:accumulation_sync=last", size)[0]
    assert ours == pytest.approx(once(late_layer, "auto", 1), rel=BF16)


# Auto -------------------------------------------------------------------------------------------------------------


def chosen(*free: int) -> tuple[int, list[str]]:
    """The reduce-scatters of a second window of four where each rank has so many bytes free, and what is said."""
    told: list[str] = []
    with (
        mock.patch("lightning_parallel.techniques.accumulation.headroom", return_value=free[dist.get_rank()]),
        mock.patch("lightning_parallel.strategies.parallel_module.rank_zero_info", told.append),
    ):
        counts = collectives_of_a_window("fsdp_custom", 4)
    return counts.number("reduce_scatter"), [message for message in told if "accumulation_sync" in message]


def test_auto_takes_what_fits(ranks: Any) -> None:
    needed = 4 * sum(p.numel() for p in ByteGPT().parameters())
    much, little = 4 * needed, 2 * needed  # two ranks share the host
    for free, reduces, word in [
        ((much, much), 4, "the last"),
        ((little, little), 16, "every"),
        ((much, little), 16, "every"),  # the rank with less decides for all
        ((little, much), 16, "every"),
    ]:
        (found, told), (other, _) = ranks(2).run(chosen, *free)
        assert found == other == reduces
        assert len(told) == 1
        assert word in told[0]

"""`GradientNorm` against `torch.nn.utils.get_total_norm` on the whole model in one process."""

from __future__ import annotations

import math
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import MixedPrecision

from lightning_parallel import ConfigurationError
from lightning_parallel.callbacks.gradient_norm import GradientNorm
from lightning_parallel.presets import PRESETS
from tests.data import loader
from tests.models.cases import CASES
from tests.names import SHARING, num_ranks
from tests.parity import TOLERANCE, trainer_for

Norms = dict[str, list[float]]
STEPS = 3


class Noted(Callback):
    """What is in the log after each batch."""

    def __init__(self) -> None:
        self.norms: Norms = {}

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        for name, value in trainer.callback_metrics.items():
            if name.startswith("norm"):
                self.norms.setdefault(name, []).append(value.item())


class Reference(Callback):
    """The same in plain torch, where every parameter is whole."""

    def __init__(self, norm_type: float) -> None:
        self.norm_type = norm_type
        self.norms: Norms = {}

    def on_before_optimizer_step(self, trainer: L.Trainer, module: L.LightningModule, optimizer: Any) -> None:
        number = f"_{trainer.optimizers.index(optimizer)}" if len(trainer.optimizers) > 1 else ""
        parameters = {p for group in optimizer.param_groups for p in group["params"]}
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None], self.norm_type)
        self.norms.setdefault(f"norm{number}", []).append(norm.item())


def logged(strategy: str, size: int, case: str, norm_type: float = 2.0, **kwargs: Any) -> Norms:
    """The norms of each step as they are logged; Lightning clips them, far below what they are."""
    L.seed_everything(3, verbose=False)
    module, noted = CASES[case]("adamw"), Noted()
    if module.automatic_optimization:
        kwargs["gradient_clip_val"] = 0.01
    trainer = trainer_for(strategy, size, callbacks=[GradientNorm("norm", norm_type=norm_type), noted], **kwargs)
    trainer.fit(module, loader(size if strategy != "dp_custom" else 1, STEPS, case))
    return noted.norms


def expected(case: str, norm_type: float = 2.0, **kwargs: Any) -> Norms:
    L.seed_everything(3, verbose=False)
    module, reference = CASES[case]("adamw"), Reference(norm_type)
    if module.automatic_optimization:
        kwargs["gradient_clip_val"] = 0.01
    trainer_for("auto", 1, callbacks=[reference], **kwargs).fit(module, loader(1, STEPS, case))
    return reference.norms


def assert_same(found: Norms, reference: Norms) -> None:
    assert list(found) == list(reference)
    for name, norms in reference.items():
        assert len(norms) == STEPS
        assert len(set(norms)) == STEPS
        assert found[name] == pytest.approx(norms, abs=TOLERANCE)


@pytest.mark.parametrize("case", ["byte_gpt", "hf_gpt2", "parameter_groups", "bare_parameter", "frozen_lora", "gan"])
@pytest.mark.parametrize("name", ["auto", *(name for name in PRESETS if name not in SHARING)])
def test_norm_of_one_process(ranks: Any, name: str, case: str) -> None:
    reference = expected(case)
    assert case == "gan" or min(reference["norm"]) > 0.02  # clipping would show
    if name in ("auto", "dp_custom"):
        assert_same(logged(name, 1, case), reference)
        return
    for found in ranks(num_ranks(name)).run(logged, name, num_ranks(name), case):
        assert_same(found, reference)


@pytest.mark.parametrize("norm_type", [1.0, math.inf])
@pytest.mark.parametrize("name", ["fsdp_custom", "ddp_custom"])
def test_other_norms(ranks: Any, name: str, norm_type: float) -> None:
    reference = expected("bare_parameter", norm_type)
    found = ranks(2).run(logged, name, 2, "bare_parameter", norm_type)[0]
    for step, norm in enumerate(reference["norm"]):
        assert found["norm"][step] == pytest.approx(norm, rel=TOLERANCE)  # a sum of thousands of numbers for 1.0


@pytest.mark.parametrize("name", ["auto", "fsdp_custom", "ddp_custom"])
def test_one_norm_for_each_accumulated_step(ranks: Any, name: str) -> None:
    """The norm of the mean over all microsteps, logged once, after the last of them."""
    reference = expected("byte_gpt", accumulate_grad_batches=STEPS)["norm"]
    size = 1 if name == "auto" else 2
    job, microsteps = (name, size, "byte_gpt"), {"accumulate_grad_batches": STEPS}
    found = (logged(*job, **microsteps) if name == "auto" else ranks(2).run(logged, *job, **microsteps)[0])["norm"]
    assert len(found) == len(reference) == 1
    assert found == pytest.approx(reference, abs=TOLERANCE)
    assert found[0] != pytest.approx(expected("byte_gpt")["norm"][0], abs=TOLERANCE)


class FusedGPT(CASES["byte_gpt"]):  # type: ignore[misc]
    is_fused = True

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4, fused=self.is_fused)


class UnfusedGPT(FusedGPT):
    is_fused = False


def half_precision(strategy: str, size: int, module_class: type[L.LightningModule]) -> list[float]:
    L.seed_everything(3, verbose=False)
    noted = Noted()
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**8))
    trainer = trainer_for(strategy, size, plugins=[plugin], callbacks=[GradientNorm("norm"), noted])
    trainer.fit(module_class("adamw"), loader(size, STEPS))
    return noted.norms["norm"]


@pytest.mark.parametrize("module_class", [UnfusedGPT, FusedGPT])
def test_loss_scale_is_taken_out(ranks: Any, module_class: type[L.LightningModule]) -> None:
    """Also where the optimizer itself divides by the scale, after the norm is taken. Tolerance of fp16."""
    reference = expected("byte_gpt")["norm"][0]
    assert half_precision("auto", 1, module_class)[0] == pytest.approx(reference, rel=1e-2)
    assert ranks(2).run(half_precision, "fsdp_custom", 2, module_class)[0][0] == pytest.approx(reference, rel=1e-2)


def test_order_of_the_norm_is_refused_in_words() -> None:
    with pytest.raises(ConfigurationError, match=r"norm_type=0 is no order of a norm; give more than 0"):
        GradientNorm(norm_type=0)

"""`ScaledLearningRate` around steps that do more, or fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lightning_parallel import full_state_dict
from lightning_parallel.callbacks.learning_rate import ScaledLearningRate
from tests.jobs.global_batches import Failing, microbatches
from tests.jobs.lifecycle import Weights
from tests.models.cases import ByteGPT
from tests.models.scheduled import Scheduled
from tests.parity import difference, trainer_for


class SetsItsRate(Scheduled):
    """Sets the rate in the closure, which stays what was set."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.optimizers().param_groups[0]["lr"] = 0.1 / (1 + batch_idx)
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class ByLBFGS(ByteGPT):
    """Reads its rate before it calls the closure, and calls that more than once."""

    rate = 0.01

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=self.rate, max_iter=2)


class ByLBFGSAtTwice(ByLBFGS):
    rate = 0.02


def final(module: Callable[[str], L.LightningModule], *callbacks: Callback) -> tuple[Weights, float]:
    L.seed_everything(3, verbose=False)
    trainer = trainer_for("auto", 1, callbacks=list(callbacks))
    trainer.fit(module("sgd"), microbatches(2, num_samples=8))
    return full_state_dict(trainer), trainer.optimizers[0].param_groups[0]["lr"]


def test_a_rate_set_in_the_closure_is_scaled_and_kept() -> None:
    class SetsTwice(SetsItsRate):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.optimizers().param_groups[0]["lr"] = 0.1 / (1 + batch_idx) * 2
            return ByteGPT.training_step(self, batch, batch_idx)

    found, rate = final(SetsItsRate, ScaledLearningRate(1, warmup_steps=0))
    assert difference(found, final(SetsTwice)[0]) == 0
    assert rate == 0.1 / 4


def test_lbfgs() -> None:
    found, rate = final(ByLBFGS, ScaledLearningRate(1, warmup_steps=0))
    assert difference(found, final(ByLBFGSAtTwice)[0]) == 0
    assert rate == 0.01


class Subclass(torch.optim.SGD):
    """Its parent's step runs the hooks again, once any plain SGD has been made."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class BySubclass(ByteGPT):
    def configure_optimizers(self) -> Any:
        torch.optim.SGD(self.parameters(), lr=0.1)
        return Subclass(self.parameters(), lr=0.1)


class ByParent(ByteGPT):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_step_inside_a_step_is_scaled_once() -> None:
    callback = ScaledLearningRate(1, warmup_steps=3)
    found, rate = final(BySubclass, callback)
    assert callback.state_dict() == {"num_updates": [4]}
    assert difference(found, final(ByParent, ScaledLearningRate(1, warmup_steps=3))[0]) == 0
    assert rate == 0.1


class Fails(torch.optim.SGD):
    """Raises in its own code in its second step."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        self.steps += 1
        if self.steps == 2:
            raise ArithmeticError
        return super().step() or loss


class StepFails(ByteGPT):
    def configure_optimizers(self) -> Any:
        return Fails(self.parameters(), lr=0.1)


class StepFailsAndIsCaught(StepFails):
    """Batch 1: the optimizer's own code fails. Batch 2: the closure fails, and the step is made once more."""

    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__(optimizer)
        self.automatic_optimization = False
        self.caught: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        for _ in range(2 if batch_idx == 2 else 1):
            assert optimizer.param_groups[0]["lr"] == 0.1
            try:
                optimizer.step(lambda: self.closure(batch, batch_idx, optimizer))
            except ArithmeticError:
                self.caught.append(batch_idx)

    def closure(self, batch: Any, batch_idx: int, optimizer: Any) -> None:
        if batch_idx == 2 and 2 not in self.caught:
            raise ArithmeticError
        optimizer.zero_grad()
        self.manual_backward(self.loss(*batch))


@pytest.mark.parametrize("module_class", [Failing, StepFails])
def test_rates_are_given_back_after_an_error(module_class: Any) -> None:
    """Of the closure, and of the optimizer's own code."""
    trainer = trainer_for("auto", 1, callbacks=[ScaledLearningRate(1, warmup_steps=0)])
    with pytest.raises(ArithmeticError):
        trainer.fit(module_class(), microbatches(2))
    (optimizer,) = trainer.optimizers
    assert [group["lr"] for group in optimizer.param_groups] == [0.1]
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


def test_a_module_that_catches_errors_of_steps_goes_on() -> None:
    callback = ScaledLearningRate(1, warmup_steps=3)
    module = StepFailsAndIsCaught("sgd")
    _, rate = final(lambda _: module, callback)
    assert module.caught == [1, 2]
    assert callback.state_dict() == {"num_updates": [3]}  # of batches 0, 2 and 3
    assert rate == 0.1

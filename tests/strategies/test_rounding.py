"""Gradients that rounding moves far: where a step switches at a value next to one of its own."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from lightning_parallel.errors import FirstStepError
from lightning_parallel.strategies import compared_window
from tests.data import batches
from tests.jobs.first_steps import said
from tests.models.cases import ByteGPT
from tests.parity import train_module

NAME = "model.head.weight"


class Smooth(ByteGPT):
    """No value of it is next to one at which it switches."""

    threshold = 0.5

    def __init__(self) -> None:
        super().__init__("sgd")
        self.gate = nn.Parameter(torch.ones(8))

    def loss(self, tokens: Tensor) -> Tensor:
        return super().loss(tokens) * torch.where(self.gate >= self.threshold, 1.0, 1.02).mean()


class Switching(Smooth):
    """As a ReLU would be whose argument is zero up to rounding."""

    threshold = 1.0


def outcome(make: Any, apart: float, strategy: str) -> str:
    """What is said of a first step in which a gradient is another one by a share of `apart`."""
    gradient_of = compared_window.whole_gradient
    parts = []

    def disturbed(parameter: Tensor) -> Tensor:
        parts.append(parameter)
        return gradient_of(parameter) * (1.0 + apart)

    looks = mock.patch.object(compared_window, "_look_different", return_value=True)
    with said() as lines, looks, mock.patch.object(compared_window, "whole_gradient", disturbed):
        try:
            train_module(make, batches("byte_gpt", 1), f"{strategy}:check=first_step", 2)
        except FirstStepError as error:
            return str(error)
    return lines[0] if lines else ""


@pytest.mark.parametrize("strategy", ["tp_custom", "cp_custom", "pp_custom"])
def test_what_rounding_explains_is_said_and_no_error(ranks: Any, strategy: str) -> None:
    line = ranks(2).run(outcome, Switching, 3e-3, strategy)[0]
    assert line.startswith("first step equals one process")
    assert "up to 3.0e-03 apart, as far as rounding moves them in one process" in line


@pytest.mark.parametrize(("make", "apart"), [(Smooth, 3e-3), (Switching, 3e-2)])
def test_other_differences_end_the_fit(ranks: Any, make: Any, apart: float) -> None:
    message = ranks(2).run(outcome, make, apart, "tp_custom")[0]
    assert "gradients differ" in message


def test_nothing_is_said_of_what_is_equal(ranks: Any) -> None:
    assert "rounding" not in ranks(2).run(outcome, Switching, 0.0, "tp_custom")[0]

"""Nothing that another pipeline stage computes gets into a tensor of this rank."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor

from lightning_parallel.module import placeholders
from lightning_parallel.module.placeholders import PlaceholderReadError, is_placeholder, placeholder_like

WRITES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "copy_": lambda own, other: own.copy_(other),
    "add_": lambda own, other: own.add_(other),
    "out": lambda own, other: torch.mul(other, 2, out=own),
    "out, of two": lambda own, other: torch.max(other, 0, out=(own[0], torch.zeros(3, dtype=torch.long))),
}


@pytest.mark.parametrize("kind", WRITES)
def test_writes_into_real_tensors_are_refused(kind: str) -> None:
    own = torch.zeros(2, 3)
    with pytest.raises(PlaceholderReadError, match=r"writes what .* \(with head.weight\) into a tensor of this rank"):
        WRITES[kind](own, placeholder_like(torch.ones(2, 3), "head.weight"))
    assert own.sum() == 0


AVERAGED = "For averages of weights, take the callback ExponentialMovingAverage"
CLIPPED = "To clip gradients, give the Trainer gradient_clip_val"


@pytest.mark.parametrize(
    ("place", "source", "advice"),
    [
        ("hook", "head.weight", AVERAGED),
        ("hook", "the gradient of head.weight", CLIPPED),
        ("", "head.weight", "Let a layer do so, or give schedule='turns'"),
    ],
)
def test_the_advice_is_for_what_is_written(place: str, source: str, advice: str) -> None:
    """Weights into an average, gradients of a norm, or what a step computes."""
    with (
        mock.patch.object(placeholders, "asking", return_value=place),
        pytest.raises(PlaceholderReadError, match=f"of this rank, and its values are not here. {advice}"),
    ):
        torch.zeros(2, 3).add_(placeholder_like(torch.ones(2, 3), source))


@pytest.mark.parametrize("call", ["retain_grad", "register_hook"])
def test_gradients_of_placeholders_are_refused(call: str) -> None:
    """Where they are those of another stage's results: they would be of one microbatch, and on one rank."""
    result = placeholder_like(torch.ones(2, 3), "head.weight") * 2
    with pytest.raises(PlaceholderReadError, match=rf"{call} .*head.weight"):
        getattr(result, call)(*[print] * (call == "register_hook"))


def test_writes_into_placeholders_stay_there() -> None:
    ours, theirs = (placeholder_like(torch.ones(2, 3), name) for name in ("a", "b"))
    assert is_placeholder(torch.mul(theirs, 2, out=ours))
    assert is_placeholder(ours.add_(torch.ones(3)))

"""Nothing that another pipeline stage computes gets into a tensor of this rank."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

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

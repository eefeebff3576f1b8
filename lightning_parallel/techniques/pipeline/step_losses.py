"""Losses of a step through a pipeline: from those of microbatches to the loss of the batch, weighted if asked for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_parallel.errors import check


class MicrobatchWeights(Protocol):
    """A callback's weights of microbatches: the numbers of tokens over which their losses are means."""

    @property
    def unit(self) -> Tensor:
        """The number of tokens that weighs 1, equal on all ranks: gradients are reduced over ranks as they are."""

    def counting(self, batch: Any) -> contextlib.AbstractContextManager[Callable[[], Tensor]]:
        """Count the tokens of a batch whose step runs inside the context; returns a function that returns them."""

    def take_total(self, tokens: Tensor) -> None:
        """Take the number of tokens of the whole batch, on every rank."""


class StepLosses:
    """The losses of one training step.

    Args:
        scale: The factor of losses before backward.
        num_parts: Into how many losses the batch is cut.
        weights: The weights of these; by default they are equal.
    """

    def __init__(self, scale: float, num_parts: int, weights: MicrobatchWeights | None = None) -> None:
        self._scale, self._num_parts, self._weights = scale, num_parts, weights
        self._counts: dict[int, Tensor] = {}

    @contextlib.contextmanager
    def counting(self, batch: Any, microbatch: int) -> Iterator[None]:
        """Count the tokens of a microbatch whose step runs inside the context.

        Args:
            batch: The microbatch.
            microbatch: Its number.
        """
        if self._weights is None:
            yield
            return
        with self._weights.counting(batch) as count:
            yield
            self._counts[microbatch] = count()

    def backward_of(self, output: Any, microbatch: int) -> Tensor:
        """Return the scalar from which the backward of a microbatch starts.

        Args:
            output: What the step has returned for it.
            microbatch: Its number.
        """
        loss = loss_in(output)
        if self._weights is None:
            return loss * (self._scale / self._num_parts)
        count = self._counts[microbatch]
        # In units of about a batch, so that scaled losses stay in the range of half precision.
        weight = (count / self._weights.unit).to(loss.dtype)
        return torch.where(count > 0, loss, 0.0) * weight * self._scale

    def reweighted(self, outputs: list[Any]) -> list[Any]:
        """Return the outputs of all microbatches with losses whose mean is that of the batch."""
        if self._weights is None:
            return outputs
        total = sum(self._counts.values(), torch.zeros(())).clamp(min=1.0)
        return [self._times(output, self._counts[n] * len(outputs) / total) for n, output in enumerate(outputs)]

    def message(self) -> Tensor | None:
        """Return what the other stages must know of the weights: the number of tokens of the whole batch."""
        return None if self._weights is None else sum(self._counts.values(), torch.zeros(())).cpu()

    def follow(self, message: Tensor | None, device: torch.device) -> None:
        """Take over `message` of the last stage, on every rank.

        Args:
            message: The number of tokens.
            device: This rank's device.
        """
        if self._weights is not None and message is not None:
            self._weights.take_total(message.to(device))

    def _times(self, output: Any, weight: Tensor) -> Any:
        loss = loss_in(output)
        loss = torch.where(weight > 0, loss, 0.0) * weight.to(loss.dtype)
        return {**output, "loss": loss} if isinstance(output, dict) else loss


def loss_in(output: Any) -> Tensor:
    """Return the loss in the output of a training step.

    Args:
        output: The loss, or a dict with it.

    Raises:
        ConfigurationError: If there is none.
    """
    loss: Any = output.get("loss") if isinstance(output, dict) else output
    check([] if isinstance(loss, Tensor) else [_NO_LOSS.format(type(loss).__name__)])
    return loss  # type: ignore[no-any-return]


_NO_LOSS = (
    "training_step returns {} for a microbatch, but a pipeline needs a loss in each: a step cannot be skipped in the "
    "middle. Return a tensor or a dict with 'loss', or give schedule='turns' or pipeline=1"
)

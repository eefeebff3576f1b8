"""Update parameters while backward still runs, so that not all gradients exist at once.

Source: Lv et al. 2023, "Full parameter fine-tuning for large language models with limited resources" (LOMO);
`torch.Tensor.register_post_accumulate_grad_hook`. FSDP2 calls a shard's hook as soon as its gradient is reduced, so a
rank has the reduced gradients of one unit at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


def update_in_backward_violations(*, clips: bool, scales: bool, num_microsteps: int, is_manual: bool) -> list[str]:
    """Reasons why parameters cannot be updated in backward; empty if they can.

    Args:
        clips: Whether gradients are clipped.
        scales: Whether the loss is scaled (``16-mixed``).
        num_microsteps: Microsteps of a window.
        is_manual: Whether the module optimizes by itself.
    """
    start = "optimizer_in_backward=True uses each gradient up as soon as it is there, but"
    found = []
    if clips:
        found.append(f"{start} gradient_clip_val needs all of them; leave one of the two out")
    if scales:
        found.append(f"{start} precision='16-mixed' skips a step only once all of them are known; give bf16-mixed")
    if num_microsteps > 1:
        found.append(f"{start} accumulate_grad_batches={num_microsteps} adds them up first; give 1")
    if is_manual:
        found.append(f"{start} under manual optimization the module decides when to step; leave it out")
    return found


class UpdateInBackward:
    """Updates of each parameter as soon as its gradient is reduced, by a user's optimizer; `detach` ends them.

    The optimizer object, its groups, state and schedulers stay the user's.

    Args:
        optimizer: The user's only optimizer.
        averaged: Parameters whose gradients are averaged after backward; the training loop's own step updates these.

    Example:
        >>> updates = UpdateInBackward(optimizer)
        >>> loss.backward()  # has updated the parameters
    """

    def __init__(self, optimizer: Optimizer, averaged: Collection[Tensor] = ()) -> None:
        self._optimizer = optimizer
        self._places: dict[Tensor, tuple[int, int]] = {}
        waits = set(averaged)
        # A parameter that is frozen now may thaw: without a hook, the step of the loop updates it.
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._update)
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter not in waits and parameter.requires_grad
        ]

    def detach(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    @torch.no_grad()
    def _update(self, parameter: Tensor) -> None:
        groups = self._optimizer.param_groups  # not kept from before: loading a state replaces them
        group = self._group_of(parameter, groups)
        if group is not None:
            parameters = group["params"]
            try:
                # Only what concerns this parameter: going through all of them here would be quadratic in their number.
                group["params"], self._optimizer.param_groups = [parameter], [group]
                # The undecorated function: hooks and counters around `step` belong to the step that the loop makes.
                type(self._optimizer).step.__wrapped__(self._optimizer)  # type: ignore[attr-defined]
            finally:
                group["params"], self._optimizer.param_groups = parameters, groups
        parameter.grad = None

    def _group_of(self, parameter: Tensor, groups: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
        """The group of `parameter`; ``None`` if it is in none any more."""
        if not self._is_at(self._places.get(parameter), parameter, groups):
            self._places = {p: (i, j) for i, group in enumerate(groups) for j, p in enumerate(group["params"])}
        place = self._places.get(parameter)
        return None if place is None else groups[place[0]]

    @staticmethod
    def _is_at(place: tuple[int, int] | None, parameter: Tensor, groups: Sequence[dict[str, Any]]) -> bool:
        if place is None or place[0] >= len(groups):
            return False
        parameters = groups[place[0]]["params"]
        return place[1] < len(parameters) and parameters[place[1]] is parameter

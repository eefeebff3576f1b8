"""Unused parameters under DDP: one look at the gradients of a first backward, on all ranks.

DDP waits for a gradient of each parameter that it reduces. If told so it looks through the graph of each step for those
that are not in it, which takes time, and has to be told before the first step. Here the first backward is completed by
gradients of zeros for what it has left out, and the ranks agree on whether there was any.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.utils.hooks import RemovableHandle


class UnusedLook:
    """Inside of this context, notes which parameters a backward gives a gradient; `complete` follows it.

    Args:
        parameters: Name -> parameter that DDP reduces; the same on all ranks.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = parameters
        self._used: set[nn.Parameter] = set()
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> UnusedLook:
        self._handles = [p.register_post_accumulate_grad_hook(self._used.add) for p in self._parameters.values()]
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()

    def complete(self, group: ProcessGroup) -> list[str]:
        """Let DDP reduce what the backward has left out; call it right behind the context. A collective.

        A parameter that no rank has used has no gradient afterwards, as in one process.

        Args:
            group: All ranks.

        Returns:
            Names of the parameters that some rank has left out, the same on all ranks.
        """
        parameters = list(self._parameters.values())
        # From here or from earlier microsteps of an accumulation window.
        have_gradient = [parameter.grad is not None for parameter in parameters]
        are_missing = [parameter not in self._used for parameter in parameters]
        if missing := [parameter for parameter in parameters if parameter not in self._used]:
            with torch.enable_grad():
                outputs = [parameter.view_as(parameter) for parameter in missing]
            torch.autograd.backward(outputs, [torch.zeros_like(parameter) for parameter in missing])
        flags = torch.tensor([are_missing, have_gradient], dtype=torch.int32, device=parameters[0].device)
        if group.size() > 1:
            dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
        are_missing, have_gradient = flags.tolist()
        for parameter, has_gradient in zip(parameters, have_gradient, strict=True):
            if not has_gradient:
                parameter.grad = None
        return [name for name, is_missing in zip(self._parameters, are_missing, strict=True) if is_missing]

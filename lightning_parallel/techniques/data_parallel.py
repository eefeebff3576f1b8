"""One process over several devices: scatter the batch, replicate the module, gather the results.

A baseline for comparison, `torch.nn.DataParallel`. It runs replicas in threads of one interpreter and copies the module
in each step; DDP does neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from typing_extensions import override


class ReplicatedSteps(nn.DataParallel[nn.Module]):
    """`nn.DataParallel` around a LightningModule, called with the name of one of its methods.

    A replica's `log` would write into the trainer from several threads at once. Replicas therefore only record their
    calls, and the module logs the mean over the replicas once.

    Args:
        module: The LightningModule, on the first device.
        device_ids: The devices; the first is where results are gathered.

    Example:
        >>> ReplicatedSteps(module, [0, 1])("training_step", batch, batch_idx)
    """

    def __init__(self, module: nn.Module, device_ids: Sequence[int]) -> None:
        super().__init__(_StepCall(module), list(device_ids))

    @override
    def gather(self, outputs: Any, output_device: Any) -> Any:
        results, logs, weights = zip(*outputs, strict=True)
        device = torch.device(output_device)
        module: Any = self.module.module
        for calls in zip(*logs, strict=True):
            name, _, options = calls[0]
            values = [torch.as_tensor(value).detach() for _, value, _ in calls]
            module.log(name, merge_results(values, weights, device), **options)
        return merge_results(results, weights, device)


class _StepCall(nn.Module):
    """A module whose `forward` calls any method, because `nn.DataParallel` only ever calls `forward`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, method: str, *args: Any, **kwargs: Any) -> Any:
        logs: list[tuple[str, Any, dict[str, Any]]] = []
        # torch marks the copies that it makes of a module.
        if getattr(self.module, "_is_replica", False):
            self.module.__dict__["log"] = lambda name, value, **options: logs.append((name, value, options))
        return getattr(self.module, method)(*args, **kwargs), logs, num_samples((args, kwargs))


def num_samples(batch: Any) -> int:
    """The size of the first dimension of the first tensor in `batch`; 1 if there is none."""
    return next((leaf.shape[0] for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim), 1)


def merge_results(results: Sequence[Any], weights: Sequence[int], device: torch.device) -> Any:
    """Merge the results of replicas into one.

    Scalars are averaged with the number of samples as weights, so that the mean of unequal parts is the mean over the
    batch; other tensors are joined along the first dimension.

    Args:
        results: The return value of each replica's step, all of one structure.
        weights: The number of samples of each replica.
        device: Where the result goes.
    """
    if any(result is None for result in results):
        return None
    total = sum(weights)

    def merge(*values: Any) -> Any:
        if not isinstance(values[0], Tensor):
            return values[0]
        moved = [value.to(device) for value in values]
        if values[0].ndim:
            return torch.cat(moved)
        return torch.stack([value * (weight / total) for value, weight in zip(moved, weights, strict=True)]).sum()

    return tree_map(merge, *results)

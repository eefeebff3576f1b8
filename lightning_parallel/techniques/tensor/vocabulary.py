"""Tensor parallel over the vocabulary: embedding, head and loss.

Source: Shoeybi et al. 2019, "Megatron-LM", section 3. Each rank has some rows of the table and looks up its own tokens;
the results are added up. The head gives each rank the logits of its own tokens. They stay a DTensor up to the loss,
which needs a maximum and two sums over the ranks, so no rank ever has all logits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_map_only

from lightning_parallel import _torch
from lightning_parallel.ranks.collectives import copy_to, reduce_from
from lightning_parallel.ranks.dtensors import full_of
from lightning_parallel.techniques.tensor.attention import HeadSplit
from lightning_parallel.techniques.tensor.parameters import split_parameters
from lightning_parallel.techniques.tensor.regions import ReplicatedRegion

_cross_entropy = F.cross_entropy
_OF_THE_WHOLE = {
    *("all", "any", "norm", "vector_norm", "linalg_norm", "prod", "std", "var", "std_mean", "var_mean", "median"),
    *("nanmedian", "mode", "kthvalue", "topk", "sort", "argsort", "cumsum", "cumprod", "logcumsumexp", "cummax"),
    *("cummin", "count_nonzero", "unique", "histc"),
}
"""Functions that get gathered logits: torch 2.13 has no right rule for them, and takes the `any` or `norm` of one part
for that of all tokens."""


def apply_vocabulary(maps: Mapping[str, nn.Module], mesh: DeviceMesh) -> None:
    """Split embeddings and heads over `mesh` by tokens, in place: their parameters become DTensors. Names stay.

    Args:
        maps: `nn.Embedding` and `nn.Linear` by path; those that share a weight go on sharing it.
        mesh: One axis: the ranks that share a matrix product.
    """
    known: dict[nn.Parameter, nn.Parameter] = {}
    for module in maps.values():
        split_parameters(module, dict.fromkeys(module._parameters, 0), mesh, known=known)
        run = _look_up if isinstance(module, nn.Embedding) else _score
        module.__class__ = _torch.modules.subclass_like(type(module), functools.partialmethod(run, mesh))


def keep_split(module: nn.Module, methods: Sequence[str], mesh: DeviceMesh) -> None:
    """Let split logits pass through steps of `module`, whose results are whole again.

    Args:
        module: The module whose steps are called.
        methods: The names of the steps.
        mesh: The ranks that share the logits.
    """
    running: list[str] = []

    def keep(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def run(*args: Any, **kwargs: Any) -> Any:
            if running:
                return original(*args, **kwargs)
            running.append(original.__name__)
            try:
                with SplitLogits(mesh):
                    result = original(*args, **kwargs)
            finally:
                running.clear()
            return tree_map_only(DTensor, DTensor.full_tensor, result)

        return run

    for method in methods:
        setattr(module, method, keep(getattr(module, method)))


def _look_up(self: Any, mesh: DeviceMesh, tokens: Tensor) -> Tensor:
    group: ProcessGroup = mesh.get_group()
    table = self.weight.to_local()
    own = tokens - mesh.get_local_rank() * table.shape[0]
    is_own = (own >= 0) & (own < table.shape[0])
    rows = F.embedding(torch.where(is_own, own, 0), table)
    # As in `nn.Embedding`, the row of the padding token gets no gradient.
    if self.padding_idx is not None:
        rows = torch.where((tokens == self.padding_idx)[..., None], rows.detach(), rows)
    return reduce_from(torch.where(is_own[..., None], rows, 0), group)


def _score(self: Any, mesh: DeviceMesh, states: Tensor) -> Tensor:
    bias = None if self.bias is None else self.bias.to_local()
    local = F.linear(copy_to(states, mesh.get_group()), self.weight.to_local(), bias)
    return DTensor.from_local(local, mesh, [Shard(local.ndim - 1)], run_check=False)


class SplitLogits(HeadSplit):
    """Mode in which split logits can be used as if they were whole.

    Args:
        mesh: The ranks that share them.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__(mesh, ReplicatedRegion(mesh.get_group()))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _cross_entropy:
            return self._loss(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") in _OF_THE_WHOLE:
            args, kwargs = tree_map_only(DTensor, self._gathered, (args, kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)

    def _loss(
        self,
        input: Tensor,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Tensor:
        classes = 1 if input.ndim > 1 else 0
        is_split = isinstance(input, DTensor) and input.placements[0].is_shard(classes)
        is_plain = weight is None and size_average is None and reduce is None and not target.is_floating_point()
        if not (is_split and is_plain):
            return _cross_entropy(
                full_of(input), target, weight, size_average, ignore_index, reduce, reduction, label_smoothing
            )
        local = input.to_local().movedim(classes, -1)  # type: ignore[attr-defined]
        is_valid = target != ignore_index
        losses = self._losses(local, torch.where(is_valid, target, 0), label_smoothing)
        losses = torch.where(is_valid, losses, 0)
        if reduction == "none":
            return losses
        total = losses.sum()
        return total / is_valid.sum() if reduction == "mean" else total

    def _losses(self, local: Tensor, target: Tensor, label_smoothing: float) -> Tensor:
        """Compute the loss of each target.

        Args:
            local: This rank's logits, `[..., vocabulary / ranks]`.
            target: Tokens, `[...]`.
            label_smoothing: The weight of all tokens together, from 0 to 1.

        Returns:
            Losses, as `target`.
        """
        size = local.shape[-1]
        largest = local.detach().amax(-1)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self._region.group)
        own = target - self._mesh.get_local_rank() * size
        is_own = (own >= 0) & (own < size)
        of_target = local.gather(-1, torch.where(is_own, own, 0)[..., None])[..., 0]
        sums = [(local - largest[..., None]).exp().sum(-1), torch.where(is_own, of_target, 0)]
        if label_smoothing:
            sums.append(local.sum(-1))
        # One all-reduce for all sums; backward needs none, because each rank's logits only enter its own summand.
        total, of_target, *of_all = reduce_from(torch.stack(sums), self._region.group)
        losses: Tensor = total.log() + largest - of_target
        if label_smoothing:
            mean = of_all[0] / (size * self._mesh.size())
            losses = (1 - label_smoothing) * losses + label_smoothing * (total.log() + largest - mean)
        return losses

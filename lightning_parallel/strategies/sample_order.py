"""Order of the rows that a step gives its stack: views of all samples one behind the other, or sample by sample.

``torch.cat([first, second])`` of two views of a batch, as in SimCLR, has the first views of all samples before the
second ones. Cut into microbatches, each of these has its own first views before its own second ones. What comes after
the stack, on the whole batch, has to find the rows where one process has them.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_parallel.ranks.random_streams import unchanged_generators
from lightning_parallel.steps import PipelinedSteps
from lightning_parallel.strategies.cut_batch import CutBatch
from lightning_parallel.strategies.cut_step import CutStep
from lightning_parallel.techniques.pipeline.cut import CutStack
from lightning_parallel.techniques.pipeline.joined import IN_ORDER, RowOrder, batch_dim, joined_rows
from lightning_parallel.techniques.pipeline.layer_router import StepPart
from lightning_parallel.techniques.pipeline.shape_inference import unchanged

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

_Found = tuple[int, int, int, int]
"""Rows of each sample, and 1 where they stand in views, in an order that nobody knows, and where that is settled."""


class SampleOrders:
    """The order of rows of each step method of a module whose stack is cut, as its batches show it.

    Args:
        module: The module.
        cut: The stack.
        all_ranks: All ranks, for host memory: those that read other samples see alike.
        device: This rank's device.
        steps: The calls around the module's steps.
        disordered: Takes the name of a step that no schedule fits, and why.
    """

    def __init__(
        self,
        module: LightningModule,
        cut: CutStack,
        all_ranks: ProcessGroup,
        device: torch.device,
        steps: PipelinedSteps,
        disordered: dict[str, str],
    ) -> None:
        self._module, self._cut, self._all_ranks, self._device, self._steps = module, cut, all_ranks, device, steps
        self._orders: dict[str, RowOrder] = {}
        self._num_batches: dict[str, int] = {}
        self._disordered = disordered

    def noted(self, step: CutStep, batch: CutBatch) -> CutBatch:
        """Return the batch with the order of the rows that the step makes of it. A collective of all ranks at times.

        In training, it is looked at until it is known, and then in batches 4, 16, 64 and so on; elsewhere, once: in the
        first batch where ranks read different samples, of which some may have fewer, else in the first that can be cut.

        Args:
            step: The step method.
            batch: The batch.
        """
        name, is_training = step.name, step.name == "training_step"
        number = self._num_batches[name] = self._num_batches.get(name, 0) + 1
        are_together = is_training or self._all_ranks.size() == self._cut.group.size()
        is_new = name not in self._orders if are_together else number == 1
        if (is_new or (is_training and math.log(number, 4).is_integer())) and len(batch.parts) > 1:
            order, is_disordered, is_known = self._all_looks(step, batch)
            is_other = is_known and self._orders.get(name, order) != order
            if is_known or not is_training:
                self._orders[name] = order
            if (is_disordered or is_other) and self._cut.plan.policy.loss != "microbatch":
                late = f" (in batch {number}, and not before)" if number > 1 else ""
                self._disordered[name] = _DISORDERED.format(late)
            return replace(batch, order=order)
        return replace(batch, order=self._orders.get(name, IN_ORDER))

    def _all_looks(self, step: CutStep, batch: CutBatch) -> tuple[RowOrder, bool, bool]:
        """The order, whether nobody knows it, and whether it is settled. A collective of all ranks."""
        is_first = self._cut.group.rank() == self._cut.plan.stages.rank_of(0)
        found = torch.tensor(self._look(step, batch) if is_first else _NOTHING)
        self._steps.order.begin()  # on all ranks, which count steps alike
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._all_ranks)
        rows, in_views, is_disordered, is_known = map(int, found)
        return RowOrder(rows, bool(in_views)), bool(is_disordered), bool(is_known)

    def _look(self, step: CutStep, batch: CutBatch) -> _Found:
        """The order of rows of the first stage."""
        as_written = torch.compiler.set_stance("force_eager")
        quiet = warnings.catch_warnings(action="ignore")
        part = StepPart(0, seed=batch.seed, leaves_at_stack=True)
        with quiet, as_written, unchanged_generators(self._device), unchanged(self._module), torch.no_grad():
            try:
                found = [step.run_stage(part, each, batch.args)[0] for each in (batch.whole, *batch.parts)]
                return order_of(found[0], found[1:], batch.part_size)
            except Exception:  # also one of the user's code: the step itself says it, if it is one
                return _UNKNOWABLE
            finally:
                self._steps.free_gathered()


def order_of(whole: Tensor, pieces: Sequence[Tensor], part_size: int) -> _Found:
    """Find the order in which rows of microbatches make those of the batch.

    Args:
        whole: What the stack is given for a batch.
        pieces: What it is given for each of its microbatches.
        part_size: The number of samples in these.

    Returns:
        The rows of each sample, 1 where these stand in views, 1 where rows stand in an order that nobody knows, and 1
        where this is settled: rows that are equal may stand in any order.
    """
    if any(piece.shape != pieces[0].shape for piece in pieces):
        return 1, 0, 1, 1
    dim = batch_dim(pieces, whole.shape)
    if dim is None:
        return _UNKNOWABLE
    rows, rest = divmod(pieces[0].shape[dim], part_size)
    orders = [RowOrder(1 if rest else rows)] + [RowOrder(rows, in_views=True)] * (rows > 1 and not rest)
    joined = [joined_rows(pieces, dim, order, part_size) for order in orders]
    fitting = [order for order, value in zip(orders, joined, strict=True) if _are_close(value, whole, dim)]
    if fitting:
        is_settled = len(fitting) == 1 and not _are_close(whole.flip(dim), whole, dim)
        return fitting[0].rows, int(fitting[0].in_views), 0, int(is_settled)
    # The same rows in another order, and not others, such as those that statistics of the batch have changed.
    own, other = (_by_sum(value, dim) for value in (joined[0], whole))
    return 1, 0, int(_are_close(own, other, 0)), 1


def _by_sum(value: Tensor, dim: int) -> Tensor:
    rows = value.double().movedim(dim, 0).flatten(1)
    return rows[rows.sum(1).argsort()]


def _are_close(first: Tensor, second: Tensor, dim: int) -> bool:
    """Whether rows differ by rounding only: convolutions and products of other batch sizes round otherwise."""
    share = 1e-3 if second.dtype in (torch.float32, torch.float64) else 1e-2
    first, second = first.double(), second.double()
    # What all rows have in common says nothing of their order.
    apart = torch.linalg.vector_norm(second - second.mean(dim, keepdim=True))
    least = _ROUNDING * torch.linalg.vector_norm(second)
    return bool(torch.linalg.vector_norm(first - second) <= share * apart + least)


_NOTHING: _Found = 1, 0, 0, 0
"""Said by ranks that have not looked."""
_UNKNOWABLE: _Found = 1, 0, 0, 1
_ROUNDING = 1e-6
"""Share of the norm by which numbers differ by rounding in single precision."""
_DISORDERED = (
    "the step gives the stack other rows, or another order of them, for a batch than for its microbatches{}; "
    "give loss='microbatch' where the loss is a mean over the samples of each of these"
)

"""Order of the rows that a step gives its stack: views of all samples one behind the other, or sample by sample.

``torch.cat([first, second])`` of two views of a batch, as in SimCLR, has the first views of all samples before the
second ones. Cut into microbatches, each of these has its own first views before its own second ones. What comes after
the stack, on the whole batch, has to find the rows where one process has them.
"""

from __future__ import annotations

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
from lightning_parallel.strategies.cut_step import CutBatch, CutStep
from lightning_parallel.techniques.pipeline.cut import CutStack
from lightning_parallel.techniques.pipeline.joined import IN_ORDER, RowOrder, batch_dim, joined_rows
from lightning_parallel.techniques.pipeline.layer_router import StepPart
from lightning_parallel.techniques.pipeline.shape_inference import unchanged

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

_Found = tuple[int, int, int]
"""Rows of each sample, 1 where they stand in views, and 1 where they stand in an order that nobody knows."""


class SampleOrders:
    """The order of rows of each step method of a module whose stack is cut, seen in its first batch.

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
        self._disordered = disordered

    def noted(self, step: CutStep, batch: CutBatch) -> CutBatch:
        """Return the batch with the order of the rows that the step makes of it. A collective of all ranks at first.

        Args:
            step: The step method.
            batch: The batch.
        """
        if step.name not in self._orders and len(batch.parts) > 1:
            is_first = self._cut.group.rank() == self._cut.plan.stages.rank_of(0)
            found = torch.tensor(self._look(step, batch) if is_first else _AS_IT_IS)
            dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._all_ranks)
            rows, in_views, is_disordered = map(int, found)
            self._orders[step.name] = RowOrder(rows, bool(in_views))
            if is_disordered and self._cut.plan.policy.loss != "microbatch":
                self._disordered[step.name] = _DISORDERED
        return replace(batch, order=self._orders.get(step.name, IN_ORDER))

    def _look(self, step: CutStep, batch: CutBatch) -> _Found:
        """The order of rows of the first stage."""
        as_written = torch.compiler.set_stance("force_eager")
        quiet = warnings.catch_warnings(action="ignore")
        part = StepPart(0, seed=batch.seed, leaves_at_stack=True)
        with quiet, as_written, unchanged_generators(self._device), unchanged(self._module), torch.no_grad():
            try:
                whole, *pieces = [step.run_stage(part, each, batch.args) for each in (batch.whole, *batch.parts)]
            except Exception:  # also one of the user's code: the step itself says it, if it is one
                return _AS_IT_IS
            finally:
                self._steps.free_gathered()
                self._steps.order.begin()
        return order_of(whole[0], [piece[0] for piece in pieces], batch.part_size) if whole else _AS_IT_IS


def order_of(whole: Tensor, pieces: Sequence[Tensor], part_size: int) -> _Found:
    """The number of rows of each sample, whether they stand in views, and whether in an order that nobody knows.

    Args:
        whole: What the stack is given for a batch.
        pieces: What it is given for each of its microbatches.
        part_size: The number of samples in these.
    """
    if any(piece.shape != pieces[0].shape for piece in pieces):
        return 1, 0, 1
    dim = batch_dim(pieces, whole.shape)
    if dim is None:
        return _AS_IT_IS
    rows, rest = divmod(pieces[0].shape[dim], part_size)
    for order in () if rest else (RowOrder(rows), RowOrder(rows, in_views=True)):
        if _are_close(joined_rows(pieces, dim, order, part_size), whole):
            return order.rows, int(order.in_views), 0
    # The same rows in another order, and not others, such as those that statistics of the batch have changed.
    own, other = (_by_sum(value, dim) for value in (torch.cat(list(pieces), dim), whole))
    return 1, 0, int(_are_close(own, other))


def _by_sum(value: Tensor, dim: int) -> Tensor:
    rows = value.float().movedim(dim, 0).flatten(1)
    return rows[rows.sum(1).argsort()]


def _are_close(first: Tensor, second: Tensor) -> bool:
    """Whether they differ by rounding only: convolutions and products of other batch sizes round otherwise."""
    norm = torch.linalg.vector_norm(second.float())
    return bool(torch.linalg.vector_norm(first.float() - second.float()) <= _CLOSE * norm)


_AS_IT_IS: _Found = 1, 0, 0
_CLOSE = 1e-2
"""Share of the norm by which rows may differ by rounding, in bf16, too."""
_DISORDERED = (
    "the step gives the stack other rows, or another order of them, for a batch than for its microbatches; "
    "give loss='microbatch' where the loss is a mean over the samples of each of these"
)

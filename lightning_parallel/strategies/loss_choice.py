"""Choice between the whole batch and microbatches for what comes after a pipeline's stack, with ``loss="auto"``.

Both are tried on the microbatches, without gradients and without a trace on the module: the loss of all of them
together, and the mean of their losses, for the hidden states that the stack returns and for others near them. Losses
that agree at a random point agree elsewhere, unless they depend on what this batch does not have: so the trial is
repeated in steps 4, 16, 64 and so on, and labels and masks of every batch are compared over its microbatches.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_flatten

from lightning_parallel import _torch
from lightning_parallel.errors import ConfigurationError, check
from lightning_parallel.module.differences import first_of, value_difference
from lightning_parallel.module.placeholders import is_placeholder
from lightning_parallel.ranks.random_streams import unchanged_generators
from lightning_parallel.steps import PipelinedSteps
from lightning_parallel.strategies.cut_batch import CutBatch
from lightning_parallel.strategies.cut_step import CutStep, foreign_violations
from lightning_parallel.strategies.loss_points import Tried, moved, tolerance_of
from lightning_parallel.strategies.sample_order import SampleOrders
from lightning_parallel.strategies.step_logs import StepLogs
from lightning_parallel.strategies.step_metrics import StepMetrics
from lightning_parallel.techniques.pipeline.cut import CutStack
from lightning_parallel.techniques.pipeline.execution import evaluation_actions
from lightning_parallel.techniques.pipeline.joined import PartGradients, Passed
from lightning_parallel.techniques.pipeline.layer_router import StepPart
from lightning_parallel.techniques.pipeline.microbatches import IGNORED, has_uneven_entries
from lightning_parallel.techniques.pipeline.shape_inference import unchanged
from lightning_parallel.techniques.pipeline.step_losses import MicrobatchWeights, loss_in
from lightning_parallel.techniques.pipeline.turns import DisorderError
from lightning_parallel.techniques.sharding import leave_forward

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule


@dataclass(frozen=True)
class Trial:
    """Result of a trial on one rank.

    Args:
        impossible: Why the rest of the step cannot run on the whole batch; empty if it can.
        whole: A loss of the whole batch; ``None`` where none was computed.
        mean: The mean over its microbatches.
        is_equal: Whether the two agree, at all points.
        logged: The name of the logged value that these are, where losses agree.
        ignored: Labels that its losses leave out.
        written: Buffers and attributes that the step writes into, once for each time that it runs.
        is_disordered: Whether it calls layers again, or in another order.
    """

    impossible: str = ""
    whole: float | None = None
    mean: float | None = None
    is_equal: bool = True
    logged: str = ""
    ignored: tuple[int, ...] = ()
    written: tuple[str, ...] = ()
    is_disordered: bool = False


class LossChoice:
    """The choice for each step method of a module whose stack is cut.

    Args:
        module: The module.
        cut: The stack.
        all_ranks: All ranks, for host memory: those that read other samples choose alike.
        device: This rank's device.
        steps: The calls around the module's steps, with weights of microbatches, if a callback has any.
    """

    def __init__(
        self,
        module: LightningModule,
        cut: CutStack,
        all_ranks: ProcessGroup,
        device: torch.device,
        steps: PipelinedSteps,
    ) -> None:
        self._module, self._cut, self._all_ranks, self._device, self._steps = module, cut, all_ranks, device, steps
        self._joins: dict[str, bool] = {}
        self._is_final: set[str] = set()
        self.disordered: dict[str, str] = {}
        """Name of a step that no schedule fits -> why."""
        self.orders = SampleOrders(module, cut, all_ranks, device, steps, self.disordered)
        self._ignored = {IGNORED}
        self._num_steps = 0

    def joins(self, step: CutStep, batch: CutBatch, *, is_training: bool, draws_early: bool) -> bool:
        """Choose whether what comes after the stack runs once, on the whole batch. A collective of all ranks.

        Args:
            step: The step method.
            batch: The batch.
            is_training: Whether backward follows.
            draws_early: Whether the step draws random numbers before the stack, on any rank.
        """
        name, count = step.name, len(batch.parts)
        if name in self._is_final or name in self.disordered:
            return self._joins.get(name, False)
        self._num_steps += is_training
        is_mean = is_training and self._steps.microbatch_weights is None
        uneven = is_mean and has_uneven_entries(batch.whole, batch.part_size * count, count, self._ignored)
        if draws_early:
            self._settle(name, joins=False)
            rank_zero_info((_MICROBATCH if is_training else _EVALUATION.format(name)) + _DRAWS)
            return False
        any_is_uneven, any_is_whole = self._any(uneven, count == 1)
        is_due = name not in self._joins or (is_training and math.log(self._num_steps, 4).is_integer())
        if is_due and not any_is_whole:
            trials = self._all_trials(step, batch, is_training=is_training)
            if news := {label for trial in trials for label in trial.ignored} - self._ignored:
                self._ignored |= news
                uneven = is_mean and has_uneven_entries(batch.whole, batch.part_size * count, count, news)
                any_is_uneven = self._any(uneven or any_is_uneven)[0]
            self._decide(name, trials, is_training=is_training, is_uneven=any_is_uneven)
        if any_is_uneven and name not in self._is_final:
            self._settle(name, joins=True)
            rank_zero_info(_BATCH.format("labels or masks of its microbatches have different numbers of entries"))
        return self._joins.get(name, False)

    def _decide(self, name: str, trials: Sequence[Trial], *, is_training: bool, is_uneven: bool) -> None:
        impossible = next((trial.impossible for trial in trials if trial.impossible), "")
        unequal = next((trial for trial in trials if not trial.is_equal), None)
        written = next((trial.written for trial in trials if trial.written), ())
        equal = next((trial for trial in trials if trial.whole is not None), None)
        if any(trial.is_disordered for trial in trials):
            self.disordered[name] = impossible
        elif impossible:
            self._settle(name, joins=False)
            way = _MICROBATCH if is_training else _EVALUATION.format(name)
            rank_zero_info(f"{way}, which is {_EXACT}; on the whole batch it cannot run: {impossible}")
        elif not is_training:
            self._settle(name, joins=True)
        elif unequal is not None:
            is_late = self._joins.get(name) is False
            self._settle(name, joins=True)
            reason = (_OF_LOGS if unequal.logged else _OF_LOSSES).format(unequal)
            rank_zero_info(_BATCH.format(reason) + (_LATE.format(self._num_steps // 4) if is_late else ""))
        elif written:
            self._settle(name, joins=True)
            rank_zero_info(_BATCH.format(f"the step changes {first_of(written)}, as often as it runs"))
        elif name not in self._joins and not is_uneven:
            self._joins[name] = False
            numbers = f" ({equal.whole:.5g} = {equal.mean:.5g})" if equal is not None else ""
            rank_zero_info(f"{_MICROBATCH}, whose mean was the loss of all of them together{numbers}")

    def _settle(self, name: str, *, joins: bool) -> None:
        self._joins[name] = joins
        self._is_final.add(name)

    # Collectives of all ranks -----------------------------------------------------------------------------------

    def _any(self, *flags: bool) -> list[bool]:
        votes = torch.tensor(flags, dtype=torch.uint8)
        dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=self._all_ranks)
        return [bool(vote) for vote in votes.tolist()]

    def _all_trials(self, step: CutStep, batch: CutBatch, *, is_training: bool) -> list[Trial]:
        found: list[Any] = [None] * self._all_ranks.size()
        dist.all_gather_object(found, self._try(step, batch, is_training=is_training), group=self._all_ranks)
        return found

    def _try(self, step: CutStep, batch: CutBatch, *, is_training: bool) -> Trial:
        """Run the rest of the step on the microbatches, both ways. A collective of the pipeline."""
        trials: list[Trial] = []

        def forward(stage: int, microbatch: int, received: Passed | None) -> Passed:
            part = StepPart(stage, received, batch.seed + microbatch)
            if stage == self._cut.plan.stages.last:
                return step.run_stack(part, batch.parts[microbatch], batch.args)
            return step.run_stage(part, batch.parts[microbatch], batch.args)

        def join(passed: list[Passed]) -> PartGradients:
            rest = _Rest(
                self._module, step, batch, self._steps.microbatch_weights if is_training else None, has_loss=is_training
            )
            trials.append(rest.compared(passed))
            return []

        actions = evaluation_actions(self._cut.plan.stages, len(batch.parts), self._cut.group.rank(), joins=True)
        # A compiler would make graphs without gradients, which training never uses, and which count to its limit.
        as_written = torch.compiler.set_stance("force_eager")
        quiet = warnings.catch_warnings(action="ignore")  # such as that of a checkpoint, which misses gradients here
        with quiet, as_written, unchanged_generators(self._device), unchanged(self._module), torch.no_grad():
            step.execution(forward, join).run(actions)
        self._steps.free_gathered()  # gradients of the step are kept by its parameters: those of the shards
        self._steps.order.begin()  # a trial that fails on one rank calls fewer layers there
        return trials[0] if trials else Trial()


class _Rest:
    """The part of a step after the stack, in a trial on the last stage."""

    def __init__(
        self,
        module: LightningModule,
        step: CutStep,
        batch: CutBatch,
        weights: MicrobatchWeights | None,
        *,
        has_loss: bool,
    ) -> None:
        self._module, self._step, self._batch, self._weights, self._has_loss = module, step, batch, weights, has_loss
        self._ignored: set[int] = set()
        self._written: list[str] = []
        self._new: dict[str, Any] = {}
        self._logged_otherwise: Trial | None = None
        self._unjoined = ""

    def compared(self, passed: list[Passed]) -> Trial:
        """Compare the loss of microbatches together with the mean of theirs."""
        own, other = self._losses(passed), self._losses([moved(part) for part in passed])
        if isinstance(own, Exception):
            reason = (str(own).splitlines() or [type(own).__name__])[0]
            if self._unjoined:
                return Trial(_UNJOINED.format(self._unjoined), is_disordered=True)
            return Trial(reason, is_disordered=isinstance(own, DisorderError))
        # A loss may not be defined at the other point, such as an entropy of no probability.
        pairs = [own] if isinstance(other, Exception) else [own, other]
        finite = [pair for pair in pairs if pair and all(map(math.isfinite, pair))]
        written = tuple(self._written)
        if not finite:
            return Trial(written=written) if not own else Trial(whole=own[0], mean=own[1], is_equal=False)
        tolerance = tolerance_of(passed)
        unequal = [(whole, mean) for whole, mean, most in finite if abs(whole - mean) > tolerance * most]
        if not unequal and self._logged_otherwise is not None:
            return self._logged_otherwise
        whole, mean = unequal[0] if unequal else finite[0][:2]
        ignored = tuple(sorted(self._ignored))
        return Trial(whole=whole, mean=mean, is_equal=not unequal, ignored=ignored, written=written)

    def _losses(self, passed: list[Passed]) -> tuple[float, float, float] | tuple[()] | Exception:
        """The loss of all microbatches, the mean of theirs, and the largest; or the first error."""
        points = [(passed, self._batch.whole)]
        if self._has_loss:
            points += [([one], part) for one, part in zip(passed, self._batch.parts, strict=True)]
        found: list[tuple[float, float]] = []
        failed: Exception | None = None
        together, apart = StepLogs(self._module), StepLogs(self._module)
        for number, point in enumerate(points):
            try:
                found.append(self._loss(*point, apart if number else together, number))
            except Exception as error:  # also one of the user's code: the step itself goes on by microbatches
                failed = failed or error
            # Each loss gathers parameters together with ranks on whose samples none raises, or another one.
            leave_forward(self._module)
        if failed is not None:
            return failed
        (whole, _), *each = found
        if not self._has_loss:
            return ()
        if self._weights is None and self._logged_otherwise is None:
            self._logged_otherwise = _logged_otherwise(together, apart, tolerance_of(passed))
        mean = sum(loss * count for loss, count in each if count) / (sum(count for _, count in each) or 1.0)
        return whole, mean, max([abs(whole), *(abs(loss) for loss, count in each if count)])

    def _loss(self, passed: list[Passed], batch: Any, logs: StepLogs, number: int) -> tuple[float, float]:
        """The loss, and its weight."""
        metrics = StepMetrics(self._module)
        joined, state = self._step.joined(passed, self._batch), self._step.state_outside_of_layers()
        counting = contextlib.nullcontext(lambda: 1.0) if self._weights is None else self._weights.counting(batch)
        # Each run begins with what the step before has left, and not with what another run has.
        with unchanged(self._module), counting as count, Tried(self._ignored):
            try:
                output = self._step.run_rest(joined, self._batch.seed, logs.of(number), batch, self._batch.args)
            finally:
                self._unjoined = self._unjoined or joined.unjoined
            weight = float(count()) if self._has_loss else 1.0
            self._written = self._written or state.changed() or self._differing(state.new_values())
        check(foreign_violations(output, logs, metrics, joins=True))
        return float(loss_in(output)) if self._has_loss else 0.0, weight

    def _differing(self, new: dict[str, Any]) -> list[str]:
        """Names of new attributes that are not what another run has left there, as a mask that is cached would be."""
        known = {name: self._new.setdefault(name, value) for name, value in new.items()}
        return [name for name, value in new.items() if not _is_equal(known[name], value)]


def _is_equal(first: Any, second: Any) -> bool:
    (leaves, form), (others, other_form) = tree_flatten(first), tree_flatten(second)
    return form == other_form and all(map(_is_equal_leaf, leaves, others))


def _is_equal_leaf(first: Any, second: Any) -> bool:
    if is_placeholder(first) or is_placeholder(second):
        return False
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return _torch.dense_parts.is_same(first, second)
    if isinstance(first, float) and isinstance(second, float):
        return first == second or (math.isnan(first) and math.isnan(second))
    plain = (bool, int, str)
    return first is second or (type(first) is type(second) and isinstance(first, plain) and first == second)


def _logged_otherwise(together: StepLogs, apart: StepLogs, tolerance: float) -> Trial | None:
    """The first logged tensor that microbatches give another value, such as the exponential of a mean."""
    try:
        parts = apart.collected()
    except ConfigurationError:  # nobody knows how values of microbatches become one, and nobody needs to
        return Trial(whole=0.0, mean=math.nan, is_equal=False, logged="a value with a reduce_fx of your own")
    values = {call.name: call.value for call in parts}
    for call in together.collected():
        of_parts = values.get(call.name)
        if not (isinstance(call.value, Tensor) and isinstance(of_parts, Tensor)):
            continue  # such as a time, which is another one in each run
        if not value_difference(of_parts, call.value) <= tolerance:
            whole, mean = float(call.value), float(of_parts)
            return Trial(whole=whole, mean=mean, is_equal=False, logged=repr(call.name))
    return None


_OF_LOSSES = "the mean over microbatches is {0.mean:.5g}, and the loss of all together {0.whole:.5g}"
_OF_LOGS = "{0.logged} would be logged as {0.mean:.5g} over microbatches, and is {0.whole:.5g} for all of them together"
_EXACT = "exact for means of equally weighted samples"
_MICROBATCH = "loss='auto': what comes after the stack runs for each microbatch"
_EVALUATION = "loss='auto': what comes after the stack runs for each microbatch in {}"
_BATCH = "loss='auto': what comes after the stack runs once on the whole batch, with the memory of gpipe: {}"
_LATE = ". In step {} they still agreed; since then, losses may have been means over microbatches"
_UNJOINED = (
    "the step takes {}, which has no dimension of samples, so that values of microbatches do not make that of the "
    "batch; give loss='microbatch' where it is a mean over samples, whose mean is taken then"
)
_DRAWS = (
    f", which is {_EXACT}; on the whole batch it cannot run, because the step draws random numbers before the stack: "
    "labels that depend on them would not be those of the microbatches. Draw them in the data loader"
)

"""Run Lightning's steps through a pipeline; every rank returns and logs the values of the whole batch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from zlib import crc32

import torch
import torch.distributed as dist
from lightning.pytorch.plugins import Precision
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_parallel import _torch
from lightning_parallel.errors import ConfigurationError, check
from lightning_parallel.parallelize import Parallelized
from lightning_parallel.ranks.lock_step import said_by_all
from lightning_parallel.ranks.random_streams import seed_of_part, unchanged_generators
from lightning_parallel.steps import PipelinedSteps
from lightning_parallel.strategies.cut_batch import CutBatch
from lightning_parallel.strategies.cut_step import CutStep
from lightning_parallel.strategies.loss_choice import LossChoice
from lightning_parallel.strategies.step_logs import StepLogs, logs_of_trace
from lightning_parallel.techniques.gathering import gather_while_running
from lightning_parallel.techniques.pipeline.call_order import called_layers
from lightning_parallel.techniques.pipeline.cut import CutStack
from lightning_parallel.techniques.pipeline.early_draws import EarlyDraws
from lightning_parallel.techniques.pipeline.execution import evaluation_actions, training_actions
from lightning_parallel.techniques.pipeline.gradients import GradientsOfStep
from lightning_parallel.techniques.pipeline.joined import Passed
from lightning_parallel.techniques.pipeline.layer_router import StepPart
from lightning_parallel.techniques.pipeline.microbatches import (
    MicrobatchCounts,
    batch_size_of,
    cut_batch,
    tensors_of,
    whole_in_parts,
    with_own_containers,
)
from lightning_parallel.techniques.pipeline.placement import (
    Placement,
    corrected,
    misplaced,
    placed_by_registration,
    trace_positions,
)
from lightning_parallel.techniques.pipeline.shape_inference import unchanged
from lightning_parallel.techniques.pipeline.stage_plan import balanced
from lightning_parallel.techniques.pipeline.step_losses import StepLosses, loss_in
from lightning_parallel.techniques.pipeline.timing import ROUNDS, StepClock, is_worth_moving
from lightning_parallel.techniques.pipeline.turns import DisorderError

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

TRAINING = "training_step"
_TIMES = "the time of layers"
_ORDER = "the order of stacks"
_ALONE = "the order of layers in {}"
_DRAWS = "random numbers before the stack of {}"


class PipelinedModule:
    """Replacements for the step methods of a module whose stack is cut, until `detach`.

    Args:
        module: The module.
        parallelized: The record of how it is cut.
        steps: The calls around its steps.
        device: This rank's device.
        loss_scale: Returns the factor of losses before backward.
        place_again: Cuts the module again by the trace of a step, and returns what runs steps in place of `run`.
    """

    def __init__(
        self,
        module: LightningModule,
        parallelized: Parallelized,
        steps: PipelinedSteps,
        *,
        device: torch.device,
        loss_scale: Callable[[], float],
        place_again: Callable[[Placement], Callable[..., Any]],
    ) -> None:
        assert parallelized.cut is not None
        self._module = module
        self._cut = parallelized.cut
        self._stacks = parallelized.plan.structure.stacks
        self._positions = self._cut.plan.placement.positions
        self._disorders: dict[str, str] = {}
        self._all_ranks = parallelized.mesh.host_group
        self._steps, self._device = steps, device
        self._loss_scale = loss_scale
        self._place_again = place_again
        self._rank = self._cut.group.rank()
        self._looked_at: set[str] = set()
        self._same_stage = parallelized.mesh.stage_host_group
        self._forget_batches()
        steps.settling.forget = self._forget_batches
        self._num_evaluated = 0
        self._own: dict[str, Any] = {}
        self._cut_steps: dict[str, CutStep] = {}

    def _forget_batches(self) -> None:
        self._choice = LossChoice(self._module, self._cut, self._all_ranks, self._device, self._steps)
        self._counts = MicrobatchCounts(self._cut.plan.policy, self._cut.plan.stages.num_ranks, self._same_stage)

    def attach(self, names: Sequence[str], looked_at: set[str] | None = None) -> None:
        """Replace the step methods `names`; those in `looked_at` were traced before and need no second trace."""
        self._looked_at = looked_at or set()
        for name in names:
            self._own[name] = self._module.__dict__.get(name)
            cut_step = CutStep(name, self._module, self._cut, self._steps, self._device)
            for method in ("run", "run_alone"):
                gather_while_running(cut_step, method, self._module)
            self._cut_steps[name] = cut_step
            # Lightning looks at the signature to decide what to pass, below one wrapper.
            run = functools.update_wrapper(functools.partial(self.run, name), cut_step.own)
            self._module.__dict__[name] = run

    def detach(self) -> set[str]:
        """Give the module its own methods back; return the names of the traced ones."""
        for name, own in self._own.items():
            self._module.__dict__.pop(name, None)
            if own is not None:
                self._module.__dict__[name] = own
        return self._looked_at

    def run(self, name: str, batch: Any, *args: Any) -> Any:
        """Run the step `name` on the whole `batch` of this rank. A collective of the pipeline."""
        if _ALONE.format(name) in self._looked_at:
            return self._cut_steps[name].run_alone(batch, *args)
        is_alone = self._all_ranks.size() == self._cut.group.size()  # all ranks have this batch
        if is_alone and not any(tensor.ndim for tensor in tensors_of(batch)):
            return self._run_out_of_order(name, _NO_SAMPLES.format(type(batch).__name__), batch, args)
        size = batch_size_of(batch)
        count = self._counts.in_training(size) if name == TRAINING else self._counts.in_evaluation(size)
        parts = cut_batch(batch, size, count)
        if (placement := self._better_placement(name, parts[0], args)) is not None:
            return self._place_again(placement)(name, batch, *args)
        if name not in self._looked_at or _ALONE.format(name) in self._looked_at:
            return self._cut_steps[name].run_alone(batch, *args)
        cut = self._choice.orders.noted(self._cut_steps[name], CutBatch(batch, parts, args, size // count))
        cut = replace(cut, joins=self._joins(name, cut))
        if (disorder := self._choice.disordered.pop(name, None)) is not None:
            return self._run_out_of_order(name, disorder, batch, args)
        if name == TRAINING:
            self._steps.settling.end_step()
            cut = replace(cut, seed=_next_seed())
            with unchanged_generators(self._device):
                return self._train(cut)
        # Most evaluations draw no numbers in one process, and shuffling the next epoch draws the next ones.
        with unchanged_generators(self._device):
            self._num_evaluated += 1
            return self._evaluate(name, replace(cut, seed=seed_of_part(_next_seed(), self._num_evaluated << 20)))

    def _run_out_of_order(self, name: str, disorder: str, batch: Any, args: Any) -> Any:
        placement = self._out_of_order(name, disorder)
        again = self.run if placement is None else self._place_again(placement)
        return again(name, batch, *args)

    def _joins(self, name: str, batch: CutBatch) -> bool:
        """Whether what comes after the stack runs once, on the whole batch."""
        wanted, draws = self._cut.plan.policy.loss, _DRAWS.format(name) in self._looked_at
        if wanted == "auto":
            return self._choice.joins(self._cut_steps[name], batch, is_training=name == TRAINING, draws_early=draws)
        check([_DRAWN.format(name)] if draws and wanted == "batch" else [])
        return wanted == "batch"

    # Both kinds of steps ----------------------------------------------------------------------------------------

    def _train(self, batch: CutBatch) -> Any:
        scale, weights = self._loss_scale(), self._steps.microbatch_weights
        losses = StepLosses(scale, 1 if batch.joins else len(batch.parts), weights)
        with GradientsOfStep(list(self._module.parameters())) as gradients:  # the step may thaw some
            plan, count = self._cut.plan, len(batch.parts)
            actions = training_actions(plan.policy, plan.stages, count, self._rank, joins=batch.joins)
            output = self._cut_steps[TRAINING].execute(actions, batch, losses)
            self._steps.after_microbatches()
        loss = gradients.attached_to(loss_in(output), scale=scale)
        return {**output, "loss": loss} if isinstance(output, dict) else loss

    def _evaluate(self, name: str, batch: CutBatch) -> Any:
        actions = evaluation_actions(self._cut.plan.stages, len(batch.parts), self._rank, joins=batch.joins)
        return self._cut_steps[name].execute(actions, batch, None)

    # How the module is to be cut --------------------------------------------------------------------------------

    def _better_placement(self, name: str, part: Any, args: Any) -> Placement | None:
        """The placement that the first trace of the step shows, if the module has to be cut again. A collective."""
        # Training decides: a stack that it does not call may be that of averages, which validation alone calls.
        if _ORDER not in self._looked_at and len(self._stacks) > 1 and (name == TRAINING or not self._looked_at):
            layers = self._called_layers(name, part, args)
            self._looked_at |= {_ORDER} if name == TRAINING else set()
            if layers != self._cut.plan.placement.layers:
                self._looked_at &= {_ORDER}  # other steps are looked at again, by what is cut then
                return placed_by_registration(self._module, layers)
        if name not in self._looked_at:
            self._looked_at.add(name)
            if (placement := self._misplaced(name, part, args)) is not None:
                return placement
        if name == TRAINING and self._cut.plan.policy.stages == "time" and _TIMES not in self._looked_at:
            self._looked_at.add(_TIMES)
            plan, step = self._cut.plan.stages, self._cut_steps[TRAINING]
            clock = StepClock(plan, self._device)
            with unchanged_generators(self._device), unchanged(self._module), torch.no_grad():
                _time_layers(clock, step, self._cut, StepLogs(self._module), part, args)
            self._steps.free_gathered()  # the step that follows looks for the parameters that are to have gradients
            costs = clock.costs(self._all_ranks)
            if is_worth_moving(costs, plan.counts, balanced(costs, plan.num_stages)):
                return self._placement(costs=costs)
        return None

    def _placement(self, **news: Any) -> Placement:
        """The present placement with what traces have shown, and other news."""
        known = self._cut.router.side_inputs.traced
        return replace(self._cut.plan.placement, positions=self._positions, known=known, **news)

    def _called_layers(self, name: str, part: Any, args: Any) -> tuple[str, ...]:
        """The layers of all stacks in the order in which the step calls them; the present order if it shows none."""
        stacks, router, layers = self._stacks, self._cut.router, self._cut.plan.placement.layers
        step, drops = functools.partial(_trace, self._cut, self._cut_steps[name], part, args), name == TRAINING
        with unchanged_generators(self._device), StepLogs(self._module).of(0), _torch.attention.slow_attention():
            order, self._disorders[name] = called_layers(self._module, stacks, router, layers, step=step, drops=drops)
        return order if len(set(said_by_all(crc32(repr(order).encode()), self._all_ranks))) == 1 else layers

    def _misplaced(self, name: str, part: Any, args: Any) -> Placement | None:
        """Where parameters are used, unless each stage has what it uses already."""
        is_first, router, module = len(self._looked_at - {_ORDER}) == 1, self._cut.router, self._module
        step = functools.partial(_trace, self._cut, self._cut_steps[name], part, args)
        draws, logs = EarlyDraws(router, module), logs_of_trace(module, router)
        traced, disorder = None, self._disorders.pop(name, "")
        with unchanged_generators(self._device), logs, _torch.attention.slow_attention(), draws:
            try:
                if not disorder:
                    traced = trace_positions(module, router, name, step)
            except Exception as error:
                disorder = _disorder_of(error, name, part)
        # On one rank that reads, perhaps, by its samples: all of them choose alike.
        found = torch.tensor([draws.found, traced is not None, bool(disorder)], dtype=torch.uint8)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._all_ranks)
        draws_early, is_cut, takes_turns = map(bool, found.tolist())
        if takes_turns:
            return self._out_of_order(name, disorder)
        if draws_early:
            self._looked_at.add(_DRAWS.format(name))
        if traced is None:
            if is_cut or name == TRAINING:
                router.check_end()
            self._looked_at.discard(name)  # it may call layers later, as one that does nothing in the sanity check
            return None
        self._positions = corrected(self._positions, traced, is_first=is_first)
        plan = self._cut.plan
        return self._placement() if misplaced(self._positions, plan.placement.positions, plan.stages) else None

    def _out_of_order(self, name: str, disorder: str) -> Placement | None:
        """Run a step that no schedule fits otherwise: in training stages take turns, another step runs alone."""
        _tell_disorder(name, disorder)
        if name == TRAINING:
            return Placement(self._cut.plan.placement.layers, {}, takes_turns=True)
        self._looked_at.add(_ALONE.format(name))
        return None


def loss_scale(precision: Precision) -> float:
    """The factor by which `precision` multiplies losses before backward."""
    scaler = getattr(precision, "scaler", None)
    return float(scaler.get_scale()) if scaler is not None else 1.0


def _time_layers(clock: StepClock, step: CutStep, cut: CutStack, logs: StepLogs, part: Any, args: Any) -> None:
    """Time the layers in a training step on a microbatch, without backward. A collective."""

    def forward(stage: int, microbatch: int, received: Passed | None) -> Passed | None:
        torch.clear_autocast_cache()
        with clock.of_stage(stage), cut.router.open(TRAINING, StepPart(stage, received, clock=clock)):
            output = step.run(part, *args)
        return output if stage != cut.plan.stages.last else None

    actions = evaluation_actions(cut.plan.stages, 1, cut.group.rank())
    with _torch.attention.slow_attention():
        for _ in range(ROUNDS):
            with logs.of(0):
                step.execution(forward).run(actions)


def _trace(cut: CutStack, step: CutStep, part: Any, args: Any) -> None:
    output = cut.router.returned(step.step(with_own_containers(part), *args))
    if step.name == TRAINING:
        loss_in(output)


def _disorder_of(error: Exception, name: str, part: Any) -> str:
    """The reason why no schedule fits a step that has ended so on a microbatch; raises the error if it is none."""
    if isinstance(error, DisorderError):
        return str(error)
    whole = whole_in_parts(part)
    if not whole or isinstance(error, ConfigurationError):
        raise error
    return _NOT_CUT.format(name, whole, type(error).__name__, str(error).replace("; ", ", "))


def _next_seed() -> int:
    """A number that all ranks of a pipeline draw alike."""
    return int(torch.randint(2**62, ()))


def _tell_disorder(name: str, disorder: str) -> None:
    """Say how a step runs that does not call each layer once, in order, and how it could fit a schedule."""
    why, _, advice = disorder.partition("; ")
    why = why or "another rank has seen that the step calls layers again, or in another order"
    how = _TURNS.format(why) if name == TRAINING else _RUNS_ALONE.format(why, name)
    rank_zero_info(how + (f". For a schedule, {advice}" if advice.startswith(("give layers=", "give loss=")) else ""))


_NO_SAMPLES = "a batch ({}) has no tensor with samples along its first dimension"
_NOT_CUT = "{} fails on a microbatch, of which {} is that of the whole batch ({}: {})"
_TURNS = (
    "{}, so no schedule fits it: pipeline stages take turns from here on, on whole batches, while the other ranks "
    "wait. schedule='turns' does so from the start"
)
_RUNS_ALONE = (
    "{}, so no schedule fits it: {} runs on whole batches, each layer on the rank that has it, while the others wait"
)
_DRAWN = (
    "{} draws random numbers before the stack, and loss='batch' runs it once more on the whole batch, where labels "
    "that depend on them would not be those of the microbatches; draw them in the data loader, or give "
    "loss='microbatch'"
)

"""Run Lightning's steps through a pipeline; every rank returns and logs the values of the whole batch."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.plugins import Precision
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lightning_parallel import _torch
from lightning_parallel.errors import check
from lightning_parallel.module.placeholders import Placeholder, name_sources, placeholders_in
from lightning_parallel.parallelize import Parallelized
from lightning_parallel.ranks.random_streams import seed_generators, seed_of_part, unchanged_generators
from lightning_parallel.ranks.stage_owners import broadcast_object
from lightning_parallel.steps import PipelinedSteps
from lightning_parallel.strategies.step_logs import StepLogs
from lightning_parallel.strategies.step_meetings import refusing_meetings
from lightning_parallel.strategies.step_metrics import StepMetrics
from lightning_parallel.techniques.pipeline.execution import Execution, Passed, evaluation_actions, training_actions
from lightning_parallel.techniques.pipeline.gradients import GradientsOfStep
from lightning_parallel.techniques.pipeline.layer_router import StageExit
from lightning_parallel.techniques.pipeline.microbatches import (
    MicrobatchCounts,
    batch_size_of,
    cut_batch,
    merge_outputs,
)
from lightning_parallel.techniques.pipeline.placement import Placement, Positions, corrected, trace_positions
from lightning_parallel.techniques.pipeline.shape_inference import unchanged
from lightning_parallel.techniques.pipeline.stage_plan import StepCosts, balanced
from lightning_parallel.techniques.pipeline.timing import ROUNDS, StepClock, is_worth_moving
from lightning_parallel.techniques.sharding import gather_while_running

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

TRAINING = "training_step"
_TIMES = "the time of layers"


class PipelinedModule:
    """Replacements for the step methods of a module whose stack is cut, until `detach`.

    Args:
        module: The module.
        parallelized: The record of how it is cut.
        steps: The calls around its steps.
        device: This rank's device.
        loss_scale: Returns the factor of losses before backward.
        place_again: Cuts the module again by the trace of a step, and returns the object that replaces this one.
    """

    def __init__(
        self,
        module: LightningModule,
        parallelized: Parallelized,
        steps: PipelinedSteps,
        *,
        device: torch.device,
        loss_scale: Callable[[], float],
        place_again: Callable[[Placement], PipelinedModule],
    ) -> None:
        assert parallelized.cut is not None
        self._module = module
        self._cut = parallelized.cut
        self._all_ranks = parallelized.mesh.host_group
        self._steps = steps
        self._device = device
        self._loss_scale = loss_scale
        self._place_again = place_again
        self._rank = self._cut.group.rank()
        self._last_rank = self._cut.plan.stages.rank_of(self._cut.plan.stages.last)
        self._looked_at: set[str] = set()
        self._counts = MicrobatchCounts(self._cut.plan.policy, self._cut.plan.stages.num_ranks)
        self._num_evaluated = 0
        self._own: dict[str, Any] = {}
        self._microsteps: dict[str, _Microstep] = {}

    def attach(self, names: Sequence[str], looked_at: set[str] | None = None) -> None:
        """Replace the step methods `names`; those in `looked_at` were traced before and need no second trace."""
        self._looked_at = looked_at or set()
        for name in names:
            self._own[name] = self._module.__dict__.get(name)
            step = refusing_meetings(getattr(self._module, name), lambda: self._module.trainer.strategy)
            microstep = _Microstep(step, self._cut.router.check_end)
            gather_while_running(microstep, "run", self._module)
            self._microsteps[name] = microstep
            # Lightning looks at the signature to decide what to pass.
            run = functools.update_wrapper(functools.partial(self.run, name), microstep.step)
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
        size = batch_size_of(batch)
        count = self._counts.in_training(size) if name == TRAINING else self._counts.in_evaluation(size)
        parts = cut_batch(batch, size, count)
        if (placement := self._better_placement(name, parts[0], args)) is not None:
            return self._place_again(placement).run(name, batch, *args)
        if name == TRAINING:
            seed = _next_seed()
            with unchanged_generators(self._device):
                return self._train(parts, args, seed, size // count)
        # Most evaluations draw no numbers in one process, and shuffling the next epoch draws the next ones.
        with unchanged_generators(self._device):
            self._num_evaluated += 1
            seed = seed_of_part(_next_seed(), self._num_evaluated << 20)
            return self._evaluate(name, parts, args, seed, size // count)

    # Both kinds of steps ----------------------------------------------------------------------------------------

    def _train(self, parts: list[Any], args: Any, seed: int, part_size: int) -> Any:
        scale = self._loss_scale()

        def loss_of(output: Any) -> Tensor:
            return _loss_in(output) * (scale / len(parts))

        with GradientsOfStep([p for p in self._module.parameters() if p.requires_grad]) as gradients:
            actions = training_actions(self._cut.plan.policy, self._cut.plan.stages, len(parts), self._rank)
            output = self._execute(TRAINING, actions, parts, args, seed, part_size, loss_of)
            self._steps.after_microbatches()
        loss = gradients.attached_to(_loss_in(output), scale=scale)
        return {**output, "loss": loss} if isinstance(output, dict) else loss

    def _evaluate(self, name: str, parts: list[Any], args: Any, seed: int, part_size: int) -> Any:
        actions = evaluation_actions(self._cut.plan.stages, len(parts), self._rank)
        return self._execute(name, actions, parts, args, seed, part_size, None)

    def _execute(
        self,
        name: str,
        actions: Any,
        parts: list[Any],
        args: Any,
        seed: int,
        part_size: int,
        loss_of: Callable[[Any], Tensor] | None,
    ) -> Any:
        logs, metrics = StepLogs(self._module), StepMetrics(self._module)
        outputs: dict[int, Any] = {}

        def forward(stage: int, microbatch: int, received: Passed | None) -> Passed | None:
            own_seed = seed_of_part(seed, microbatch)
            seed_generators(own_seed)
            is_last = stage == self._cut.plan.stages.last
            with (
                # Every stage begins with the step, and what it logs and counts before the stack; the last one ends it.
                logs.of(microbatch) if is_last else StepLogs(self._module).of(microbatch),
                contextlib.nullcontext() if is_last else metrics.dropped(),
                _torch.attention.slow_attention(),
                self._cut.router.open(name, stage, received, own_seed),
            ):
                torch.clear_autocast_cache()
                output = self._microsteps[name].run(parts[microbatch], *args)
            if not is_last:
                return output  # type: ignore[no-any-return]
            check(_foreign([*placeholders_in(output), *logs.placeholders(), *metrics.placeholders()]))
            outputs[microbatch] = tree_map_only(Tensor, Tensor.detach, output)
            return (loss_of(output),) if loss_of is not None else None

        self._execution(name, forward).run(actions)
        return self._share([outputs[index] for index in sorted(outputs)], logs, metrics, part_size)

    def _execution(self, name: str, forward: Callable[[int, int, Passed | None], Passed | None]) -> Execution:
        return Execution(
            self._cut.plan.stages,
            group=self._cut.group,
            host_group=self._cut.host_group,
            device=self._device,
            forward=forward,
            num_passed=functools.partial(self._cut.router.side_inputs.num_passed, name),
            before_backward=self._steps.before_microbatch_backward,
        )

    def _share(self, outputs: list[Any], logs: StepLogs, metrics: StepMetrics, part_size: int) -> Any:
        """The output of the whole batch on all ranks, and its logs replayed there. A collective of the pipeline."""
        own = merge_outputs(outputs, part_size) if outputs else None
        message = (tree_map_only(Tensor, Tensor.cpu, own), logs.collected(), metrics.updated()) if outputs else None
        output, records, updated = broadcast_object(message, self._last_rank, self._cut.host_group)
        if not outputs:
            metrics.follow(updated)
        logs.replay(records, self._device)
        if outputs:
            return own
        return tree_map_only(Tensor, lambda value: value.to(self._device), output)

    # How the module is to be cut --------------------------------------------------------------------------------

    def _better_placement(self, name: str, part: Any, args: Any) -> Placement | None:
        """The placement that the first trace of the step shows, if the module has to be cut again. A collective."""
        if name not in self._looked_at:
            self._looked_at.add(name)
            if (positions := self._misplaced(name, part, args)) is not None:
                return Placement(positions, self._cut.plan.placement.costs, self._cut.router.side_inputs.by_step)
        if name == TRAINING and self._cut.plan.policy.stages == "time" and _TIMES not in self._looked_at:
            self._looked_at.add(_TIMES)
            costs, plan = self._measured(part, args), self._cut.plan.stages
            if is_worth_moving(costs, plan.counts, balanced(costs, plan.num_stages)):
                return Placement(self._cut.plan.placement.positions, costs, self._cut.router.side_inputs.by_step)
        return None

    def _misplaced(self, name: str, part: Any, args: Any) -> Positions | None:
        """Where parameters are used, unless each stage has what it uses already."""
        with unchanged_generators(self._device), StepLogs(self._module).of(0), _torch.attention.slow_attention():
            traced = trace_positions(self._module, self._cut.router, name, lambda: self._traced_step(name, part, args))
        plan = self._cut.plan
        return corrected(plan.placement.positions, traced, plan.stages, is_first=len(self._looked_at) == 1)

    def _traced_step(self, name: str, part: Any, args: Any) -> None:
        output = self._microsteps[name].step(part, *args)
        if name == TRAINING:
            _loss_in(output)

    def _measured(self, part: Any, args: Any) -> StepCosts:
        """Times of the layers in a training step on a microbatch, without backward. A collective."""
        clock = StepClock(self._cut.plan.stages, self._device)

        def forward(stage: int, microbatch: int, received: Passed | None) -> Passed | None:
            torch.clear_autocast_cache()
            with clock.of_stage(stage), self._cut.router.open(TRAINING, stage, received, clock=clock):
                output = self._microsteps[TRAINING].run(part, *args)
            return output if stage != self._cut.plan.stages.last else None

        with (
            unchanged_generators(self._device),
            unchanged(self._module),
            torch.no_grad(),
            _torch.attention.slow_attention(),
        ):
            for _ in range(ROUNDS):
                with StepLogs(self._module).of(0):
                    self._execution(TRAINING, forward).run(evaluation_actions(self._cut.plan.stages, 1, self._rank))
        return clock.costs(self._all_ranks)


def loss_scale(precision: Precision) -> float:
    """The factor by which `precision` multiplies losses before backward."""
    scaler = getattr(precision, "scaler", None)
    return float(scaler.get_scale()) if scaler is not None else 1.0


def _loss_in(output: Any) -> Tensor:
    loss: Any = output.get("loss") if isinstance(output, dict) else output
    check([] if isinstance(loss, Tensor) else [_NO_LOSS.format(type(loss).__name__)])
    return loss  # type: ignore[no-any-return]


class _Microstep:
    """A step method on a microbatch; a stage that is not the last one leaves it early."""

    def __init__(self, step: Callable[..., Any], check_end: Callable[[], None]) -> None:
        self.step = step
        self._check_end = check_end

    def run(self, *args: Any) -> Any:
        try:
            output = self.step(*args)
        except StageExit as exit_:
            return exit_.passed
        self._check_end()
        return output


def _next_seed() -> int:
    """A number that all ranks of a pipeline draw alike."""
    return int(torch.randint(2**62, ()))


def _foreign(placeholders: list[Placeholder]) -> list[str]:
    if not placeholders:
        return []
    return [
        "what the step returns, logs or gives to a metric depends on something that only another pipeline stage "
        f"computes (with {name_sources(placeholders) or 'other layers'}): only what the first layer of a stage "
        "is given passes from stage to stage. Leave it out, or give pipeline=1"
    ]


_NO_LOSS = (
    "training_step returns {} for a microbatch, but a pipeline needs a loss in each: a step cannot be skipped in the "
    "middle. Return a tensor or a dict with 'loss', or give pipeline=1"
)

"""One of Lightning's step methods, run stage by stage and microbatch by microbatch."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torchmetrics import Metric

from lightning_parallel import _lightning, _torch
from lightning_parallel.errors import check
from lightning_parallel.module.differences import first_of
from lightning_parallel.module.held_modules import held_modules
from lightning_parallel.module.held_objects import HeldObjects
from lightning_parallel.module.object_state import ObjectState, tensors_inside
from lightning_parallel.module.placeholders import name_sources, placeholders_in
from lightning_parallel.module.written_state import WrittenState
from lightning_parallel.ranks.random_streams import seed_generators, seed_of_part
from lightning_parallel.ranks.stage_owners import broadcast_object
from lightning_parallel.steps import PipelinedSteps
from lightning_parallel.strategies.asked_gradients import noting_asked
from lightning_parallel.strategies.cut_batch import CutBatch
from lightning_parallel.strategies.step_logs import StepLogs
from lightning_parallel.strategies.step_meetings import refusing_meetings
from lightning_parallel.strategies.step_metrics import StepMetrics
from lightning_parallel.techniques.pipeline.cut import CutStack
from lightning_parallel.techniques.pipeline.execution import Action, Execution
from lightning_parallel.techniques.pipeline.joined import JoinedOutputs, PartGradients, Passed
from lightning_parallel.techniques.pipeline.layer_router import StageExit, StepPart
from lightning_parallel.techniques.pipeline.microbatches import merge_outputs, with_own_containers
from lightning_parallel.techniques.pipeline.shape_inference import unchanged
from lightning_parallel.techniques.pipeline.stage_buffers import StageBuffers
from lightning_parallel.techniques.pipeline.step_losses import StepLosses
from lightning_parallel.techniques.pipeline.written_parameters import WrittenParameters

_Joining = Callable[[list[Passed], CutBatch], JoinedOutputs]
_OF_LIGHTNING = frozenset(vars(LightningModule()))
"""Attributes that Lightning keeps for itself."""


class CutStep:
    """A step method of a module whose stack is cut.

    Args:
        name: Its name.
        module: The module.
        cut: The stack.
        steps: The calls around the module's steps.
        device: This rank's device.
    """

    def __init__(
        self, name: str, module: LightningModule, cut: CutStack, steps: PipelinedSteps, device: torch.device
    ) -> None:
        self.own: Callable[..., Any] = getattr(module, name)
        """The module's own method."""
        self.step = refusing_meetings(self.own, lambda: module.trainer.strategy, cut.group)
        self.name, self._module, self._cut, self._steps, self._device = name, module, cut, steps, device
        self._buffers = StageBuffers(module, cut)
        self._waiting = functools.partial(_waiting, module)
        rows: dict[int, Any] = {}
        num_beside = functools.partial(cut.router.side_inputs.num_beside, name)
        self.joined: _Joining = lambda passed, batch: batch.joined(passed, num_beside(), rows)
        """Joins what the last stage has computed for each microbatch."""
        self._parameters = WrittenParameters(module, cut.host_group, self._waiting)
        self._last = cut.plan.stages.last
        self._last_rank = cut.plan.stages.rank_of(self._last)

    def run(self, batch: Any, *args: Any) -> Any:
        """Call the user's method on a part of a batch; a stage that is not the last one leaves it early."""
        try:
            with self._cut.router.side_inputs.carried.noting(is_on=True), noting_asked():
                output = self.step(with_own_containers(batch), *args)
        except StageExit as exit_:
            return exit_.passed
        self._cut.router.check_end()
        return self._cut.router.returned(output)

    def run_alone(self, *args: Any) -> Any:
        """Call the user's method on a whole batch, outside of any schedule. A collective if it calls layers."""
        return self.own(*args)

    def execute(self, actions: tuple[Action, ...], batch: CutBatch, losses: StepLosses | None) -> Any:
        """Run `actions` on a batch, and return the step's output for all of it, on every rank. A collective.

        Args:
            actions: Those of this rank, with a `JOIN` where ``batch.joins``.
            batch: The batch.
            losses: The losses, if backward follows.
        """
        logs, metrics = StepLogs(self._module), StepMetrics(self._module)
        self._buffers.note()
        state = self.state_outside_of_layers() if batch.joins else None
        outputs: dict[int, Any] = {}

        def counted(part: Any, number: int) -> contextlib.AbstractContextManager[None]:
            return contextlib.nullcontext() if losses is None else losses.counting(part, number)

        def forward(stage: int, microbatch: int, received: Passed | None) -> Passed | None:
            own_seed = seed_of_part(batch.seed, microbatch)
            part, own = StepPart(stage, received, own_seed), batch.parts[microbatch]
            if batch.joins and stage == self._last:
                return self.run_stack(part, own, batch.args)
            if stage != self._last:
                # Every stage begins with the step, and what it logs and counts before the stack; the last one ends it.
                with metrics.dropped(), _once(self._module, self._cut, batch), _noting_samples(batch, state):
                    return self.run_stage(part, own, batch.args)
            with counted(own, microbatch), metrics.of_part():
                output = self._run_part(part, own_seed, logs.of(microbatch), own, batch.args)
            return finish(output, microbatch)

        def finish(output: Any, microbatch: int) -> Passed | None:
            check(foreign_violations(output, logs, metrics, joins=batch.joins))
            outputs[microbatch] = tree_map_only(Tensor, Tensor.detach, output)
            return None if losses is None else (losses.backward_of(output, microbatch),)

        def join(passed: list[Passed]) -> PartGradients:
            joined = self.joined(passed, batch)
            seed = seed_of_part(batch.seed, len(batch.parts))
            with counted(batch.whole, 0):
                output = self.run_rest(joined, seed, logs.of(0), batch.whole, batch.args)
            found = finish(output, 0)
            if found is not None and found[0].requires_grad:
                self._steps.before_microbatch_backward()
                with torch.autocast(self._device.type, enabled=False):
                    found[0].backward()  # type: ignore[no-untyped-call]
            return joined.gradients()

        with self._parameters.checked(), metrics.shown(is_cut=not batch.joins):
            self.execution(forward, join if batch.joins else None).run(actions)
        return self._share(outputs, logs, metrics, batch, losses, state)

    def run_stack(self, part: StepPart, batch: Any, args: Any) -> Passed:
        """Run the last stage on a microbatch up to the end of the stack, and leave no trace outside of the layers.

        The step will run to its end on the whole batch: what it does before the stack must not count twice.

        Args:
            part: The last stage.
            batch: The microbatch.
            args: Further arguments of the step.
        """
        part = replace(part, leaves_stack=True)
        with _without_trace(self._module, self._cut.router.has):
            return self._run_part(part, part.seed or 0, StepLogs(self._module).of(0), batch, args)  # type: ignore[no-any-return]

    def run_stage(self, part: StepPart, batch: Any, args: Any) -> Passed:
        """Run another stage than the last one on a microbatch.

        Args:
            part: The stage.
            batch: The microbatch.
            args: Further arguments of the step.
        """
        return self._run_part(part, part.seed or 0, StepLogs(self._module).of(0), batch, args)  # type: ignore[no-any-return]

    def run_rest(
        self, joined: JoinedOutputs, seed: int, kept: contextlib.AbstractContextManager[None], batch: Any, args: Any
    ) -> Any:
        """Run what comes after the stack.

        Args:
            joined: What the stack has returned.
            seed: The seed of random numbers.
            kept: Takes the logs.
            batch: The batch that it was computed from.
            args: Further arguments of the step.
        """
        return self._run_part(StepPart(self._last, joined=joined), seed, kept, batch, args)

    def state_outside_of_layers(self) -> WrittenState:
        """Note what modules outside of the layers hold, without metrics, which count microbatches as they are."""
        outside = _outside(self._module, self._cut.router.has)
        modules = {path: child for path, child in outside.items() if not isinstance(child, Metric)}
        return WrittenState(modules, ignored=_OF_LIGHTNING)

    def execution(
        self,
        forward: Callable[[int, int, Passed | None], Passed | None],
        join: Callable[[list[Passed]], PartGradients] | None = None,
    ) -> Execution:
        """Return what runs actions of this step.

        Args:
            forward: Runs a stage on a microbatch.
            join: Runs the rest of the step on the whole batch, where that is wanted.
        """
        return Execution(
            self._cut.plan.stages,
            group=self._cut.group,
            host_group=self._cut.host_group,
            device=self._device,
            forward=forward,
            num_passed=functools.partial(self._cut.router.side_inputs.num_passed, self.name),
            before_backward=self._steps.before_microbatch_backward,
            waiting=self._waiting,
            join=join,
        )

    def _run_part(
        self, part: StepPart, seed: int, kept: contextlib.AbstractContextManager[None], batch: Any, args: Any
    ) -> Any:
        seed_generators(seed)
        with kept, _torch.attention.slow_attention(), self._cut.router.open(self.name, part):
            torch.clear_autocast_cache()
            return self.run(batch, *args)

    def _share(
        self,
        outputs: dict[int, Any],
        logs: StepLogs,
        metrics: StepMetrics,
        batch: CutBatch,
        losses: StepLosses | None,
        state: WrittenState | None,
    ) -> Any:
        """The output of the whole batch, logs, and what it has written, on all ranks. A collective of the pipeline."""
        with self._waiting():
            self._buffers.share()
        own, message, trainer = None, None, self._module.trainer
        if outputs:
            in_order = [outputs[number] for number in sorted(outputs)]
            in_order = in_order if losses is None else losses.reweighted(in_order)
            own = merge_outputs(in_order, batch.part_size, batch.order)
            weights = losses.message() if losses is not None else None
            news = {} if state is None else state.news()
            of_logs = logs.collected(), metrics.updated()
            message = tree_map_only(Tensor, Tensor.cpu, own), of_logs, weights, news, trainer.should_stop
        with self._waiting():
            message = broadcast_object(message, self._last_rank, self._cut.host_group)
        output, (records, updated), weights, news, stops = message
        trainer.should_stop = trainer.should_stop or stops  # what the step sets behind its layers
        if losses is not None:
            losses.follow(weights, self._device)
        if not outputs:
            metrics.follow(updated)
            if state is not None:
                state.follow(news, self._device)
        logs.replay(records, self._device)
        return own if outputs else tree_map_only(Tensor, lambda value: value.to(self._device), output)


def _waiting(module: Any) -> contextlib.AbstractContextManager[Any]:
    """Tell the profiler that this rank waits for others."""
    return module.trainer.profiler.profile(_lightning.actions.WAITING)  # type: ignore[no-any-return]


def _once(module: nn.Module, cut: CutStack, batch: CutBatch) -> contextlib.AbstractContextManager[None]:
    """Leave no trace outside of the layers, where that of the last stage on the whole batch is the step's."""
    return _without_trace(module, cut.router.has) if batch.joins else contextlib.nullcontext()


@contextlib.contextmanager
def _noting_samples(batch: CutBatch, state: WrittenState | None) -> Iterator[None]:
    """Say of an error that a step before may be its cause, which has kept something of more samples."""
    try:
        yield
    except RuntimeError as error:
        num_samples = batch.part_size * len(batch.parts)
        if state is not None and (kept := state.of_samples(num_samples)):
            error.add_note(
                f"Up to the last layer, a pipeline runs the step on {batch.part_size} samples at a time, while "
                f"{first_of(kept)} of an earlier step has those of all {num_samples}. Put it into the batch, use it "
                "behind the layers, or give schedule='turns' or pipeline=1"
            )
        raise


@contextlib.contextmanager
def _without_trace(module: nn.Module, is_in_layer: Callable[[str], bool]) -> Iterator[None]:
    """Leave no trace of a run on what is outside of the layers: attributes, lists, buffers, states of metrics."""
    outside = _outside(module, is_in_layer)
    states = [ObjectState(child, lambda name, _: name not in ("_parameters", "_modules")) for child in outside.values()]
    values = (value for state in states for value in state.attributes.before.values())
    buffers = [buffer for child in outside.values() for buffer in child.buffers(recurse=False)]
    tensors = dict.fromkeys([*buffers, *(t for t in tensors_inside(values) if not t.is_inference())])
    objects = HeldObjects(outside.values())
    written = [(tensor, tensor._version, tensor.detach().clone()) for tensor in tensors]
    with contextlib.ExitStack() as stack:
        for child in outside.values():
            if isinstance(child, Metric):
                stack.enter_context(unchanged(child))
        try:
            yield
        finally:
            for state in states:
                state.restore(keeps_new=True)  # such as Hugging Face's note that its hooks are there
            objects.restore()
            # Only what was written: backward of what has read a buffer finds it as it was.
            with torch.no_grad():
                for tensor, version, before in written:
                    if tensor._version != version:
                        tensor.copy_(before)


def _outside(module: nn.Module, is_in_layer: Callable[[str], bool]) -> dict[str, nn.Module]:
    return {path: child for path, child in held_modules(module).items() if not is_in_layer(f"{path}.")}


def foreign_violations(output: Any, logs: StepLogs, metrics: StepMetrics, *, joins: bool) -> list[str]:
    """Reasons for which an output of the last stage is refused; empty if it has all of it.

    Args:
        output: What the step has returned there.
        logs: What it has logged.
        metrics: What it has given to metrics.
        joins: Whether it has run on the whole batch.
    """
    placeholders = [*placeholders_in(output), *logs.placeholders(), *metrics.placeholders()]
    if not placeholders:
        return []
    also = "; with loss='batch', where it has entries for each sample" if joins else ""
    return [
        "what the step returns, logs or gives to a metric depends on something that only another pipeline stage "
        f"computes (with {name_sources(placeholders) or 'other layers'}): what operations and layers take passes from "
        f"stage to stage{also}, and nothing else. Leave it out, or give schedule='turns' or pipeline=1"
    ]

"""A module while it is parallel: its plan, its steps, and its pipeline if it has one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from lightning_parallel import _lightning
from lightning_parallel.checkpoint.full_state import make_optimizer_whole
from lightning_parallel.module.optimizer_state import StateOfRank
from lightning_parallel.module.placeholders import is_placeholder
from lightning_parallel.parallelize import Parallelized, parallelize, parallelized
from lightning_parallel.plan import Plan, cut_again, split_again
from lightning_parallel.ranks.memory import host_memory
from lightning_parallel.ranks.mesh import Mesh
from lightning_parallel.ranks.stage_owners import untag_owners
from lightning_parallel.steps import PipelinedSteps, Steps, TurnSteps
from lightning_parallel.strategies.first_calls import (
    agreed_plan,
    first_calls,
    takes_iterator,
    told,
    unrecorded_violations,
)
from lightning_parallel.strategies.optimizers import adopt_optimizers
from lightning_parallel.strategies.pipeline_refusals import misplaced_violations, turned_violations
from lightning_parallel.strategies.pipelined_module import PipelinedModule, loss_scale
from lightning_parallel.strategies.process_group import ProcessGroupStrategy
from lightning_parallel.strategies.stuck_units import stuck_units_watched
from lightning_parallel.techniques.pipeline.placement import Placement
from lightning_parallel.techniques.pipeline.stage_plan import StepCosts
from lightning_parallel.techniques.sharding import abandon_step


class ParallelModule:
    """Makes the module of a strategy parallel, or takes over one that an earlier fit left so. A collective.

    Args:
        strategy: The strategy, once its process group is there.
        mesh: The ranks.
    """

    def __init__(self, strategy: ProcessGroupStrategy, mesh: Mesh) -> None:
        self._strategy, self._module, self._mesh = strategy, strategy.module, mesh
        self._device, self._num_local_ranks = strategy.root_device, strategy.num_processes
        self._pipelined: PipelinedModule | None = None
        self._optimizers: Sequence[Optimizer] = ()
        self._handed_out: Sequence[object] = ()
        self._guards: list[StateOfRank] = []
        self._watch = ExitStack()
        left = parallelized(self._module)
        self.was_left = left is not None
        self.current: Parallelized = left or self._parallelize()
        self.steps = self._build_steps()

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        # A copy of a trainer sets up its own module, which is not parallel before.
        return type(None), ()

    def _parallelize(self) -> Parallelized:
        strategy, module = self._strategy, self._module
        plan = strategy.plan_for(module)
        if plan.policies.offload != "none" and self._device.type == "cpu":
            rank_zero_info("offload: the device is the host, so there is nothing to offload; sharding only")
        converted = strategy.precision_plugin.convert_module(module)
        assert converted is module
        if (sync := _lightning.layer_sync(strategy)) is not None:
            sync.apply(module)
            layers = [layer for stack in plan.structure.stacks for layer in stack.layers]
            count_samples_once(module, strategy.data_group, layers if int(plan.degrees.context) > 1 else [])
        return parallelize(module, plan, self._mesh, self._device, strategy._deferral.record)

    def _build_steps(self) -> Steps:
        cut = self.current.cut
        return (Steps if cut is None else PipelinedSteps if cut.turns is None else TurnSteps)(
            self._module,
            self.current,
            device=self._device,
            ranks_on_device=self._num_local_ranks if self._device.type == "cpu" else 1,
            tell=rank_zero_info,
        )

    def attach(self, optimizers: Sequence[Optimizer], handed_out: Sequence[object]) -> None:
        """Let `optimizers` step as the policies say, and the steps of the module run through its pipeline.

        Args:
            optimizers: The user's.
            handed_out: Lightning's wrappers that the module sees in their place.
        """
        self._optimizers, self._handed_out = optimizers, handed_out
        self._watch.enter_context(stuck_units_watched(lambda: self.steps.order, self._strategy._failures))
        self.steps.adopt(optimizers, handed_out)
        self._attach_pipeline()

    def _attach_pipeline(self, looked_at: set[str] | None = None) -> None:
        if self.current.cut is not None:
            where = "under a pipeline"
            self._guards = [StateOfRank(optimizer, is_placeholder, where=where) for optimizer in self._optimizers]
        if isinstance(self.steps, PipelinedSteps):
            self._pipelined = PipelinedModule(
                self._module,
                self.current,
                self.steps,
                device=self._device,
                loss_scale=lambda: loss_scale(self._strategy.precision_plugin),
                place_again=self._cut_again,
            )
            self._pipelined.attach(self.current.plan.policies.step_methods, looked_at)

    def _cut_again(self, placement: Placement) -> Callable[..., Any]:
        """Cut the module again, according to the trace of a step, and return what runs its steps. A collective."""
        assert self._pipelined is not None
        looked_at, self._pipelined = self._pipelined.detach(), None
        too_large, weights = self.is_too_large, getattr(self.steps, "microbatch_weights", None)
        self._strategy.refuse(
            turned_violations(self._module, self.current, is_too_large=too_large, weights_parts=weights is not None)
            if placement.takes_turns
            else misplaced_violations(self._module, self.current, placement, is_too_large=too_large)
        )
        self._make_plain()
        plan = cut_again(self.current.plan, self._module, placement)
        before = self.steps
        self._parallelize_again(plan)
        assert isinstance(before, PipelinedSteps)
        if isinstance(self.steps, PipelinedSteps):
            self.steps.microbatch_weights, self.steps.settling = before.microbatch_weights, before.settling
        self._attach_pipeline(looked_at)
        if self._pipelined is None:
            before.settling.end_step()
            return self._run_in_turns
        assert plan.pipeline is not None
        if placement.costs is not None:
            _tell_stages(placement.costs, plan.pipeline.stages.counts)
        return self._pipelined.run

    def _run_in_turns(self, name: str, *args: Any) -> Any:
        """The rest of the step in which stages have begun to take turns."""
        self.steps.begin()
        with self.steps.forward():
            return getattr(self._module, name)(*args)

    def see_layers(self, name: str, args: Sequence[Any]) -> None:
        """Split the layers that wait for the first step to show their arguments, if there are any. A collective then.

        Args:
            name: The name of the step that is about to run.
            args: Its arguments.

        Raises:
            ConfigurationError: For layers that cannot be split.
        """
        plan, strategy, module = self.current.plan, self._strategy, self._module
        if plan.tensor is None or not plan.tensor.unseen:
            return
        # Also where there is no gradient, or inference: parameters are made anew.
        with torch.inference_mode(False), torch.enable_grad():
            gives_iterator = takes_iterator(module, name)
            strategy.refuse(
                unrecorded_violations(plan.tensor.unseen, is_too_large=self.is_too_large, gives_iterator=gives_iterator)
            )
            calls = first_calls(
                module,
                name,
                args,
                plan.tensor.unseen,
                precision=strategy.precision_plugin,
                optimizers=self._optimizers,
                device=self._device,
            )
            self._make_plain()
            plan = agreed_plan(split_again(plan, module, calls), self._mesh.host_group)
            strategy.refuse(list(plan.violations))
            self._parallelize_again(plan)
        rank_zero_info(told(plan, name, calls))

    def _parallelize_again(self, plan: Plan) -> None:
        """Apply another plan to the module once it is plain, and let its optimizers train the result. A collective."""
        self.current = parallelize(self._module, plan, self._mesh, self._device)
        adopt_optimizers(self._optimizers, self._module, self.current.replaced())
        _lightning.move_optimizers(self._optimizers, self._device)
        self.steps.close()
        self.steps = self._build_steps()
        self.steps.adopt(self._optimizers, self._handed_out)

    @property
    def is_too_large(self) -> bool:
        """Whether a rank should not hold the whole module."""
        return _module_bytes(self._module) > self._share_of_host_memory // 4

    @property
    def _share_of_host_memory(self) -> int:
        return host_memory() // max(1, self._num_local_ranks)

    def close(self, *, is_interrupted: bool) -> None:
        """Make the module and its optimizers whole and plain on every rank, if a rank can hold it. A collective.

        After an error other ranks may be gone: a collective would wait for them until it times out. So it stays as it
        is then, unless there is only one rank.
        """
        self._watch.close()
        self.steps.close()
        if self._pipelined is not None:
            self._pipelined.detach()
        if is_interrupted:
            abandon_step(self._module)
        if not is_interrupted or self._strategy.world_size == 1:
            is_plain = self._make_plain()
            if is_plain and (sync := _lightning.layer_sync(self._strategy)) is not None:
                sync.revert(self._module)

    def _make_plain(self) -> bool:
        """Make the module plain. False if it stays as it is, too large for the memory of one rank."""
        is_changed = bool(self.current.replaced()) or self.current.cut is not None
        if is_changed and self.is_too_large:
            size, share = _module_bytes(self._module), self._share_of_host_memory
            rank_zero_info(
                f"the module stays sharded: whole it takes {size / 2**30:.1f} GiB, more than a quarter of a rank's "
                f"{share / 2**30:.1f} GiB of host memory. full_state_dict(trainer) and checkpoints work as before"
            )
            return False
        own = self.current.undo(self._module)
        for optimizer in self._optimizers:
            make_optimizer_whole(optimizer, own)
        for guard in self._guards:
            guard.detach()
        self._guards = []
        untag_owners(self._module)  # states were gathered by these tags; the next fit makes its own
        return True


def count_samples_once(module: nn.Module, readers: ProcessGroup, with_parts: Sequence[str]) -> None:
    """Let synchronized BatchNorm ask one rank of those that share samples: the correction of variances counts samples.

    Args:
        module: The module, with `nn.SyncBatchNorm`.
        readers: The ranks that read different samples.
        with_parts: Paths of layers in which each rank has positions of its own, so that all ranks count.
    """
    for name, layer in module.named_modules():
        if isinstance(layer, nn.SyncBatchNorm) and not f"{name}.".startswith(tuple(f"{path}." for path in with_parts)):
            layer.process_group = readers


def _module_bytes(module: nn.Module) -> int:
    return sum(parameter.numel() * parameter.itemsize for parameter in module.parameters())


def _tell_stages(costs: StepCosts, counts: tuple[int, ...]) -> None:
    total = sum(costs.layers) + costs.first + costs.last
    rank_zero_info(
        f"pipeline stages of {', '.join(map(str, counts))} layers, by measured time: the slowest takes "
        f"{costs.largest(counts) / total:.0%} of a step, where {1 / len(counts):.0%} is the least. stages="
        f"{list(counts)} keeps them"
    )

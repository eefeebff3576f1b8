"""What a strategy does around a module whose stack is cut into pipeline stages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.optim import Optimizer

from lightning_parallel.parallelize import Parallelized
from lightning_parallel.steps import PipelinedSteps, StepPolicies, Steps
from lightning_parallel.strategies.optimizers import adopt_optimizers
from lightning_parallel.strategies.pipeline_refusals import misplaced_violations
from lightning_parallel.strategies.pipelined_module import PipelinedModule, loss_scale
from lightning_parallel.strategies.stepping import SteppingStrategy
from lightning_parallel.techniques.pipeline.placement import Placement
from lightning_parallel.techniques.pipeline.stage_plan import StepCosts

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

STEP_METHODS = ("training_step", "validation_step", "test_step", "predict_step")


class PipelinedStrategy(SteppingStrategy):
    """A strategy whose module may have pipeline stages; a subclass makes it parallel, and plain again."""

    _parallelized: Parallelized | None = None
    _pipelined: PipelinedModule | None = None
    _step_policies: StepPolicies

    @property
    def _training_optimizers(self) -> list[Optimizer]:
        """The optimizers that hold the module's parameters as they are now, not as an earlier fit gave them back."""
        return self.optimizers if self._has_cut_optimizers else []

    def _parallelize(self, module: LightningModule, placement: Placement | None = None) -> Parallelized:
        raise NotImplementedError

    def _make_plain(self, module: LightningModule, parallelized: Parallelized) -> None:
        raise NotImplementedError

    def _is_too_large(self, module: LightningModule) -> bool:
        raise NotImplementedError

    def _make_steps(self, module: LightningModule, parallelized: Parallelized) -> Steps:
        return (Steps if parallelized.cut is None else PipelinedSteps)(
            module,
            parallelized,
            self._step_policies,
            device=self.root_device,
            ranks_on_device=self.num_processes if self.root_device.type == "cpu" else 1,
            tell=rank_zero_info,
        )

    def _attach_pipeline(self, looked_at: set[str] | None = None) -> None:
        module, parallelized, steps = self.lightning_module, self._parallelized, self._steps
        if module is not None and parallelized is not None and isinstance(steps, PipelinedSteps):
            self._pipelined = PipelinedModule(
                module,
                parallelized,
                steps,
                device=self.root_device,
                loss_scale=lambda: loss_scale(self.precision_plugin),
                place_again=self._place_again,
            )
            self._pipelined.attach(overridden_steps(module), looked_at)

    def _place_again(self, placement: Placement) -> PipelinedModule:
        """Cut the module anew, by what a look at a step has shown. A collective."""
        module = self.lightning_module
        assert module is not None
        assert self._parallelized is not None
        assert self._pipelined is not None
        looked_at = self._pipelined.detach()
        self.refuse(
            misplaced_violations(module, self._parallelized, placement, is_too_large=self._is_too_large(module))
        )
        self._make_plain(module, self._parallelized)
        self._parallelized = self._parallelize(module, placement)
        adopt_optimizers(self._training_optimizers, module, self._parallelized.replaced())
        _optimizers_to_device(self._training_optimizers, self.root_device)
        self.steps.close()
        self._steps = self._make_steps(module, self._parallelized)
        self._steps.adopt(self._training_optimizers)
        self._attach_pipeline(looked_at)
        if placement.costs is not None and self._parallelized.cut is not None:
            self._tell_stages(placement.costs, self._parallelized.cut.plan.counts)
        return self._pipelined

    def _tell_stages(self, costs: StepCosts, counts: tuple[int, ...]) -> None:
        total = sum(costs.layers) + costs.first + costs.last
        rank_zero_info(
            f"pipeline stages of {', '.join(map(str, counts))} layers, by measured time: the slowest takes "
            f"{costs.largest(counts) / total:.0%} of a step, where {1 / len(counts):.0%} is the least. stages="
            f"{list(counts)} keeps them"
        )

    def _detach_pipeline(self) -> None:
        if self._pipelined is not None:
            self._pipelined.detach()
        self._pipelined = None


def overridden_steps(module: LightningModule) -> list[str]:
    """The step methods that `module` has."""
    return [name for name in STEP_METHODS if is_overridden(name, module)]

"""Reasons why a module cannot be pipelined: all at once, before anything starts."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

from lightning_parallel import _torch
from lightning_parallel.parallelize import Parallelized
from lightning_parallel.techniques.pipeline.placement import Placement, misplaced
from lightning_parallel.techniques.pipeline.plan import sharing_violations
from lightning_parallel.techniques.pipeline.schedules import PipelinePolicy, turn_violations
from lightning_parallel.techniques.pipeline.stage_plan import balanced

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule


def pipelined_module_violations(module: LightningModule, policy: PipelinePolicy) -> list[str]:
    """Reasons that lie in the module.

    Args:
        module: The user's module.
        policy: How its stack is cut.
    """
    found = []
    is_manual = not module.automatic_optimization
    if is_manual and not policy.takes_turns:
        found += turn_violations(policy, f"{type(module).__name__}.automatic_optimization=False")
    code = getattr(type(module).configure_gradient_clipping, "__code__", None)
    calls_lightning = {"clip_gradients", "configure_gradient_clipping"} & set(getattr(code, "co_names", ()))
    if is_overridden("configure_gradient_clipping", module) and not calls_lightning:
        found.append(
            f"{type(module).__name__}.configure_gradient_clipping does not call self.clip_gradients; under a pipeline "
            "a rank has the gradients of its own layers only, so a norm that it takes by itself is not that of all. "
            "Call self.clip_gradients(optimizer, gradient_clip_val=...)"
        )
    in_parts = ("training_step", "validation_step", "test_step", "predict_step")
    for name in () if is_manual or policy.takes_turns else in_parts:
        if is_overridden(name, module) and "dataloader_iter" in inspect.signature(getattr(module, name)).parameters:
            found.append(
                f"{name} takes the dataloader's iterator, so there is no batch that a pipeline could cut; let it take "
                "(batch, batch_idx), or give schedule='turns' or pipeline=1"
            )
    return found


def compiled_violations(module: nn.Module, layers: Sequence[str]) -> list[str]:
    """Reasons that lie in what the user compiles: a pipeline leaves a graph of all layers in the middle.

    Args:
        module: The user's module.
        layers: Paths of the layers that are cut into stages.
    """
    compiled = [path for path, child in module.named_modules() if path and _torch.modules.is_compiled(child)]
    around = [path for path in compiled if any(layer.startswith(f"{path}.") for layer in layers)]
    return [
        f"{path} is compiled together with the layers in it, and a pipeline runs a part of them on each stage; leave "
        "torch.compile out, and give compile=layers, which compiles layer by layer"
        for path in around[:1]
    ]


def turned_violations(
    module: LightningModule, parallelized: Parallelized, *, is_too_large: bool, weights_parts: bool
) -> list[str]:
    """Reasons why stages cannot begin to take turns in the first step; empty if they can.

    Args:
        module: The user's module.
        parallelized: The record of how it is cut.
        is_too_large: Whether a rank cannot hold the whole module, which cutting it again takes.
        weights_parts: Whether a callback weights the losses of microbatches.
    """
    name, found = type(module).__name__, sharing_violations(module, parallelized.plan.structure)
    if is_too_large:
        found.append(f"{name} is too large to be put together and cut again, so that its stages take turns; {_GIVE}")
    if weights_parts:
        found.append(f"TokenWeighted weights losses of microbatches, and {name} has to run on whole batches; {_GIVE}")
    return found


_GIVE = "give schedule='turns', which cuts it so from the start"


def misplaced_violations(
    module: LightningModule, parallelized: Parallelized, placement: Placement, *, is_too_large: bool
) -> list[str]:
    """Reasons why parameters cannot be moved to the stages that use them; empty if they can.

    Args:
        module: The user's module.
        parallelized: The record of how it is cut.
        placement: The stages that use each parameter, from the trace of a step.
        is_too_large: Whether a rank cannot hold the whole module, which cutting it again takes.
    """
    if not is_too_large:
        return []
    plan = parallelized.plan.pipeline
    assert plan is not None
    if placement.layers != plan.placement.layers:
        return [
            f"{type(module).__name__} calls its layers in another order than it registers them ({placement.layers[0]} "
            f"before {plan.placement.layers[0]}), and it is too large to be put together and cut again; give layers= "
            "with the stacks in the order in which they are called"
        ]
    names = misplaced(placement.positions, plan.placement.positions, plan.stages)
    if not names and placement.costs is not None:
        stages = list(balanced(placement.costs, plan.stages.num_stages))
        return [
            f"stages='time' needs the whole module on a rank once, and {type(module).__name__} is too large for that; "
            f"give what was measured, stages={stages}, or 'auto'"
        ]
    return [
        f"{type(module).__name__} registers {len(names)} parameters on the other side of the layer stack than where a "
        f"step uses them ({', '.join(names[:4])}), and it is too large to be put together and cut again; register them "
        "in the order in which they are used"
    ]

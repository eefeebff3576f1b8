"""Reasons why a mesh of ranks cannot train with these options, or this module: all at once, before anything starts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import callbacks
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.utils._pytree import tree_leaves

from lightning_parallel import _lightning, _torch
from lightning_parallel.errors import ConfigurationError
from lightning_parallel.plan import Plan
from lightning_parallel.policies import Policies
from lightning_parallel.ranks.degrees import Degrees, reshard_violations
from lightning_parallel.strategies.pipeline_refusals import compiled_violations, pipelined_module_violations
from lightning_parallel.strategies.refusals import layer_policy_violations
from lightning_parallel.techniques.accumulation import accumulation_violations
from lightning_parallel.techniques.context.attention import ATTENTIONS
from lightning_parallel.techniques.offload import offload_violations
from lightning_parallel.techniques.pipeline.schedules import pipeline_violations
from lightning_parallel.techniques.update_in_backward import update_in_backward_violations

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

_AVERAGING = tuple(
    getattr(callbacks, name)
    for name in ("StochasticWeightAveraging", "WeightAveraging")
    if hasattr(callbacks, name)  # the second since Lightning 2.6
)
_OWN_TABLES = frozenset({"_parameters", "_buffers", "_modules", *_torch.modules.HOOK_TABLES})
"""Attributes of every module, which keep no parameters but its own."""
_NO_CONTAINERS = (torch.Tensor, int, float, str, type(None))
"""Kinds of attributes in which nothing is kept; a module has dozens of them."""


def mesh_violations(
    given: Degrees,
    world_size: int,
    local_world_size: int,
    policies: Policies,
    device: torch.device,
    *,
    syncs: bool = False,
) -> list[str]:
    """Reasons that lie in the degrees and the options, whatever the module is.

    Args:
        given: The degrees as given, not resolved.
        world_size: The number of all ranks.
        local_world_size: The ranks on one machine.
        policies: The options.
        device: This rank's device.
        syncs: Whether ``sync_batchnorm=True`` was given.
    """
    try:
        degrees = given.resolve(world_size, local_world_size)
        found = [*_degree_violations(degrees, policies), *_batchnorm_violations(degrees, syncs=syncs)]
    except ConfigurationError as error:
        found = list(error.violations)
    return [
        *found,
        *idle_violations(given, policies.given),
        *offload_violations(policies.offload),
        *layer_policy_violations(policies.layer, device),
        *accumulation_violations(policies.accumulation_sync),
    ]


def mesh_module_violations(
    module: LightningModule, plan: Plan | None, policies: Policies, *, cuts: bool, is_fitting: bool
) -> list[str]:
    """Reasons that lie in the module.

    Args:
        module: The user's module.
        plan: What would be done to it; ``None`` for one that is parallel already, and was looked at before.
        policies: The options.
        cuts: Whether its stack is cut into pipeline stages.
        is_fitting: Whether it is to be trained.
    """
    found: list[str] = []
    replaces = False
    if plan is not None:
        replaces = plan.replaces_parameters
        found += plan.violations
        found += unshardable_violations(module) if replaces else []
        found += forward_method_violations(module, policies.forward_methods)
        found += compiled_violations(module, plan.structure.layers) if cuts else []
    return [*found, *unbuilt_violations(module, policies, replaces=replaces, cuts=cuts, is_fitting=is_fitting)]


def unbuilt_violations(
    module: LightningModule, policies: Policies, *, replaces: bool, cuts: bool, is_fitting: bool
) -> list[str]:
    """Reasons that lie in the Trainer and in methods of the module, whatever hooks have still to build.

    Args:
        module: The user's module.
        policies: The options.
        replaces: Whether parameters are sharded, split or cut.
        cuts: Whether a stack is cut into pipeline stages.
        is_fitting: Whether the module is to be trained.
    """
    found = unshardable_callback_violations(module) if replaces else []
    if cuts:
        found += pipelined_module_violations(module, policies.pipeline)
    if policies.optimizer_in_backward and is_fitting:
        found += in_backward_violations(module, offloads_optimizer=policies.offload == "optimizer")
    return found


def _degree_violations(degrees: Degrees, policies: Policies) -> list[str]:
    assert isinstance(degrees.shard, int)
    return [
        *_pipeline_violations(degrees, policies),
        *reshard_violations(policies.reshard, degrees.shard),
        *_tensor_violations(degrees, policies),
        *_context_violations(degrees, policies),
    ]


def _pipeline_violations(degrees: Degrees, policies: Policies) -> list[str]:
    """Reasons that lie in the schedule, and in options that do not go with a pipeline."""
    start = f"pipeline={degrees.pipeline}"
    if not isinstance(degrees.pipeline, int) or degrees.pipeline == 1:
        return []
    found = pipeline_violations(policies.pipeline, degrees.pipeline)
    if policies.offload == "all":
        found.append(f"{start} with offload='all': stages sum gradients on the device; give offload='optimizer'")
    if policies.optimizer_in_backward:
        found.append(
            f"{start} with optimizer_in_backward=True: a gradient is complete only after the last of several "
            "microbatches; give one of the two"
        )
    if policies.forward_methods:
        found.append(
            f"{start} with forward_methods={list(policies.forward_methods)}: outside of a step no rank can run "
            "all layers; call such methods after fit has returned, where the module is whole"
        )
    return found


def _batchnorm_violations(degrees: Degrees, *, syncs: bool) -> list[str]:
    """Reasons that lie in statistics which all ranks are to share, though they run different layers."""
    if not syncs or degrees.pipeline == 1:
        return []
    return [
        f"sync_batchnorm=True with pipeline={degrees.pipeline}: all ranks would have to run a layer's BatchNorm "
        "together, and those of other stages never do; leave it out (statistics are then those of a microbatch), or "
        "give pipeline=1"
    ]


def _tensor_violations(degrees: Degrees, policies: Policies) -> list[str]:
    """Reasons that lie in what was given beside ``tensor``."""
    found = []
    if degrees.tensor != 1:
        assert isinstance(degrees.shard, int)
        assert isinstance(degrees.context, int)
        # One rank is "never", and all of them are "always", to torch as well.
        if isinstance(policies.reshard, int) and policies.reshard not in (1, degrees.shard * degrees.context):
            found.append(
                f"reshard={policies.reshard} with tensor={degrees.tensor}: torch cannot keep parameters that are split "
                "gathered over a part of the ranks; give reshard='always' or 'never'"
            )
        if policies.layer.recompute.startswith("budget"):
            found.append(
                f"recompute={policies.layer.recompute!r} with tensor={degrees.tensor}: torch's compiler cannot tell "
                "how much memory a graph takes that holds process groups; give recompute='full', 'every:2' or "
                "'selective'"
            )
    if policies.sequence and degrees.context != 1:
        found.append(
            f"sequence=True with context={degrees.context}: sequences are split over other ranks already; give one of "
            "the two"
        )
    return found


def _context_violations(degrees: Degrees, policies: Policies) -> list[str]:
    """Reasons that lie in what was given beside ``context``."""
    found = []
    attention, float8 = policies.context_attention, policies.layer.float8
    if attention not in ATTENTIONS:
        found.append(f"context_attention={attention!r} is not known; possible: {', '.join(ATTENTIONS)}")
    if degrees.context != 1 and str(float8).startswith("tensorwise"):
        found.append(
            f"float8={float8!r} scales by the largest number of a tensor, which is another one in a part of it: "
            f"a layer cannot be compared with itself on the whole; give rowwise, or context=1 in place of "
            f"{degrees.context}"
        )
    return found


def idle_violations(given: Degrees, options: Mapping[str, Sequence[str]]) -> list[str]:
    """Options that belong to a degree which is given as 1, so that they would be ignored.

    Not for a degree that is 1 because there are too few devices: with more of them, the options have an effect.

    Args:
        given: The degrees as given, not resolved.
        options: Degree -> the options that belong to it, in words.
    """
    return [
        f"{option} is for {degree} > 1, but {degree}=1; leave it out, or give {degree}=2 or more"
        for degree, chosen in options.items()
        if getattr(given, degree) == 1
        for option in chosen
    ]


def unshardable_violations(module: LightningModule) -> list[str]:
    """Reasons that follow from sharding, which replaces the parameter objects of the module."""
    found = []
    hooked = [name for name, parameter in module.named_parameters() if any(_torch.autograd.hooks_of(parameter))]
    if hooked:
        found.append(
            f"{len(hooked)} parameters have hooks of their own, which sharding would not run: {', '.join(hooked[:4])}; "
            "hook modules instead (register_full_backward_hook), or use zero1_custom"
        )
    if kept := _kept_elsewhere(module):
        found.append(
            f"parameters are kept outside of the modules that own them, where sharding cannot replace them: "
            f"{', '.join(kept[:4])}; read them from their module in each step, or use zero1_custom"
        )
    if scripted := _scripted(module):
        found.append(
            f"the parameters of scripted modules are objects of C++, which sharding cannot replace: "
            f"{', '.join(scripted[:4])}; leave out torch.jit.script and torch.jit.trace, or use zero1_custom"
        )
    sparse = [path for path, child in module.named_modules() if getattr(child, "sparse", False) is True]
    if sparse:
        found.append(f"sparse gradients cannot be sharded: {', '.join(sparse[:4])}; give sparse=False, or ddp_custom")
    return found


def _scripted(module: nn.Module) -> list[str]:
    """The outermost scripted or traced modules that have parameters."""
    scripted = {
        path: child
        for path, child in module.named_modules()
        if isinstance(child, torch.jit.ScriptModule) and any(True for _ in child.parameters())
    }
    return [path for path in scripted if path.rpartition(".")[0] not in scripted]


def unshardable_callback_violations(module: LightningModule) -> list[str]:
    """Reasons that lie in callbacks and loggers of the Trainer, if there is one, which handle whole parameters."""
    found = []
    trainer: Any = _lightning.attached_trainer(module)
    used = trainer.callbacks if trainer is not None else ()
    if any(isinstance(callback, callbacks.ModelPruning) for callback in used):
        found.append("ModelPruning sorts and replaces whole parameters, which sharding cuts; use ddp_custom")
    if graphs := _lightning.graph_loggers(trainer.loggers if trainer is not None else ()):
        found.append(
            f"{', '.join(graphs)}(log_graph=True) runs the module on rank 0 only, where it waits for the others; leave "
            "it out, and log the graph of the plain module with its add_graph, before or after fit"
        )
    averaging = [type(callback).__name__ for callback in used if isinstance(callback, _AVERAGING)]
    if averaging:
        found.append(
            f"{', '.join(averaging)} copies whole parameters, which sharding cuts; use ExponentialMovingAverage of "
            "lightning_parallel.callbacks, which averages parts, or zero1_custom"
        )
    return found


def _kept_elsewhere(module: nn.Module) -> list[str]:
    """Containers on a module that hold parameters, at any depth; torch's recurrent layers keep theirs up to date."""
    parameters = set(module.parameters())
    return [
        f"{path}.{name}".lstrip(".")
        for path, child in module.named_modules()
        if not isinstance(child, nn.RNNBase)
        for name, value in vars(child).items()
        if name not in _OWN_TABLES and not isinstance(value, _NO_CONTAINERS)
        if any(isinstance(item, nn.Parameter) and item in parameters for item in tree_leaves(value))
    ]


def forward_method_violations(module: nn.Module, methods: Iterable[str]) -> list[str]:
    """Reasons that lie in `forward_methods`.

    Args:
        module: The user's module.
        methods: Dotted paths of methods.
    """
    found = []
    for method in methods:
        path, _, name = method.rpartition(".")
        holder = dict(module.named_modules()).get(path)
        if holder is None or not callable(getattr(holder, name, None)):
            found.append(
                f"forward_methods has {method!r}, but {type(module).__name__} has no such method; give dotted paths "
                "such as 'model.generate'"
            )
    return found


def in_backward_violations(module: LightningModule, *, offloads_optimizer: bool) -> list[str]:
    """Reasons that lie in updating parameters while backward still runs.

    Args:
        module: The user's module; without a Trainer there are none.
        offloads_optimizer: Whether optimizer state waits in host memory between updates.
    """
    trainer: Any = _lightning.attached_trainer(module)
    if trainer is None:
        return []
    accumulates = [c for c in trainer.callbacks if isinstance(c, callbacks.GradientAccumulationScheduler)]
    found = update_in_backward_violations(
        clips=bool(trainer.gradient_clip_val),
        scales=str(trainer.precision) == "16-mixed",
        num_microsteps=max([trainer.accumulate_grad_batches, *(max(c.scheduling.values()) for c in accumulates)]),
        is_manual=not module.automatic_optimization,
    )
    hooks = ("configure_gradient_clipping", "on_before_optimizer_step", "on_after_backward", "optimizer_step")
    if finding_none := [name for name in hooks if is_overridden(name, module)]:
        found.append(
            f"optimizer_in_backward=True has used the gradients up before {', '.join(finding_none)} of "
            f"{type(module).__name__} is called; leave one of the two out"
        )
    if offloads_optimizer:
        found.append(
            "optimizer_in_backward=True and offload='optimizer': the state would travel for each parameter; "
            "give offload='all' or leave one of the two out"
        )
    return found

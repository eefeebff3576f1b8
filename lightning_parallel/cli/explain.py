"""What a strategy would do to a module: its layers, the degrees, and where each linear map goes."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

from lightning_parallel.layer_trace import is_transposed, linear_maps
from lightning_parallel.layers import Anatomy, Stack, find_layers
from lightning_parallel.strategies.mesh import MeshStrategy
from lightning_parallel.tensor_plan import TensorPlan, plan_tensor

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

    from lightning_parallel.degrees import Degrees
    from lightning_parallel.parallelize import Policies


def explain(trainer: Trainer, module: LightningModule) -> str:
    """What ``trainer.fit(module)`` would do, as a text; starts no process, and changes neither.

    A module that is built in `configure_model` is built on the meta device, in a copy.

    Args:
        trainer: With the strategy and the number of devices.
        module: The module, before any fit.

    Example:
        >>> print(explain(Trainer(strategy="tp_custom", accelerator="cpu", devices=2), module))
    """
    strategy: Any = trainer.strategy
    module = _built(strategy, module)
    name = type(module).__name__
    if not isinstance(strategy, MeshStrategy):
        anatomy = find_layers(module)
        whole = f"{type(strategy).__name__} on {trainer.world_size} ranks: it has no degrees, and splits no layer"
        return "\n".join([f"{name}: {anatomy.explain()}", "", whole])
    policies, degrees = strategy._policies(module), strategy.degrees
    anatomy = find_layers(module, policies.layer.layers)
    parts = [f"{name}: {anatomy.explain()}", _degrees(degrees), *_tensor(module, anatomy, policies, degrees)]
    return "\n\n".join(parts)


def _built(strategy: Any, module: LightningModule) -> LightningModule:
    deferral = getattr(strategy, "_deferral", None)
    if deferral is None or not is_overridden("configure_model", module):
        return module
    module = copy.deepcopy(module)
    deferral.attach(module)
    module.configure_model()
    deferral.detach()
    return module


def _degrees(degrees: Degrees) -> str:
    sizes = {n: getattr(degrees, n) for n in ("replicate", "shard", "context", "tensor", "pipeline")}
    total = degrees.data * degrees.context * degrees.tensor * degrees.pipeline  # type: ignore[operator]
    product = " x ".join(f"{name} {size}" for name, size in sizes.items())
    return f"{total} ranks = {product}; {degrees.data} read different samples"


def _tensor(module: nn.Module, anatomy: Anatomy, policies: Policies, degrees: Degrees) -> list[str]:
    size = degrees.tensor
    if size == 1:
        return ["tensor=1: no linear map is split"]
    plan = plan_tensor(module, anatomy, policies.tensor_plan, degree=size)
    if plan.violations:
        return ["\n".join([f"tensor={size} is refused", *(f"  {violation}" for violation in plan.violations)])]
    placements = [f"tensor parallel over {size} ranks, by {plan.source}"]
    collectives = ["collectives of a layer among the ranks that share it, counted by its branches"]
    for stack in anatomy.stacks:
        placements += _placements(module, stack, plan, int(size))
        collectives += _collectives(module, stack, plan)
    return ["\n".join(placements), "\n".join(collectives)]


def _placements(module: nn.Module, stack: Stack, plan: TensorPlan, size: int) -> list[str]:
    layers: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for layer in stack.layers:
        for name, linear in linear_maps(module.get_submodule(layer)):
            layers[name, _placement(linear, plan.roles.get(f"{layer}.{name}", "whole"), size)].append(layer)
    return [f"  {_once(stack, paths)}.{name}: {placement}" for (name, placement), paths in layers.items()]


def _placement(linear: Any, role: str, size: int) -> str:
    """The role, the shape of the weight, and the shape of a rank's part of it."""
    if role == "heads":
        return f"heads, {linear.num_heads} -> {linear.num_heads // size}"
    if not hasattr(linear, "weight"):
        return role
    shape = list(linear.weight.shape)
    local = list(shape)
    if role != "whole":
        local[int((role == "colwise") == is_transposed(linear))] //= size
    return f"{role}, {shape}" + (f" -> {local}" if local != shape else "")


def _collectives(module: nn.Module, stack: Stack, plan: TensorPlan) -> list[str]:
    layers: defaultdict[str, list[str]] = defaultdict(list)
    for path in stack.layers:
        layers[_sent(module.get_submodule(path), plan.below(path))].append(path)
    return [f"  {_once(stack, paths)}: {text}" for text, paths in layers.items()]


def _sent(layer: nn.Module, roles: dict[str, str]) -> str:
    """What the branches of `layer` send: each ends with a sum over the ranks, and begins with one in backward."""
    branches = [name for name, role in roles.items() if role in ("rowwise", "heads")]
    if not branches:
        return "no branch is closed" if roles else "not split"
    heads = [layer.get_submodule(name) for name, role in roles.items() if role == "heads"]
    packed = sum(getattr(each, name) is not None for each in heads for name in ("in_proj_weight", "in_proj_bias"))
    number = len(branches)
    gathers, scatters = f", {packed} all-gathers of packed weights", f", {packed} reduce-scatters"
    return (
        f"forward {number} all-reduces ({', '.join(branches)}){gathers if packed else ''}; "
        f"backward {number} all-reduces{scatters if packed else ''}"
    )


def _once(stack: Stack, layers: list[str]) -> str:
    """One path for layers of a stack: with ``*`` if these are all."""
    if len(layers) == len(stack.layers):
        return f"{stack.path}.*"
    return f"{stack.path}.[{', '.join(layer.removeprefix(f'{stack.path}.') for layer in layers)}]"

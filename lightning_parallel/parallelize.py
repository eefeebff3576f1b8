"""The one page on which techniques meet; the order of the calls is the order of application. Layer 3.

tensor -> context -> recompute -> compile -> shard | replicate. A pipeline splits first and calls this on each part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lightning_parallel.checkpoint.whole import whole
from lightning_parallel.errors import ConfigurationError
from lightning_parallel.footprint import Footprint
from lightning_parallel.init_record import InitRecord
from lightning_parallel.layers import find_layers
from lightning_parallel.mesh import Mesh
from lightning_parallel.precision import DtypePolicy
from lightning_parallel.techniques.offload import build_offload_policy
from lightning_parallel.techniques.replicate import synchronize_module
from lightning_parallel.techniques.sharding import (
    ShardingPlan,
    apply_sharding,
    finish_sharding,
    gather_in_method,
    plan_sharding,
    reshard_units,
    unreduced_parameters,
)
from lightning_parallel.techniques.unused import UnusedParameters


@dataclass(frozen=True, kw_only=True)
class Policies:
    """The rules by which a module is made parallel; none of them knows the module.

    Args:
        layers: Paths of the layer stacks, where the search should not decide.
        step_methods: Methods that are called in place of the module's `forward`.
        forward_methods: Further methods, by dotted path, in which parameters are to be gathered.
        backward_in_step: Whether backward runs inside the step (manual optimization).
        reshard: When gathered parameters are freed: ``"always"``, ``"never"``, or over how many ranks they stay.
        offload: ``"none"`` or ``"all"``.
        dtypes: Dtypes of gathering and reducing.
    """

    layers: str | Sequence[str] | None = None
    step_methods: Sequence[str] = ()
    forward_methods: Sequence[str] = ()
    backward_in_step: bool = False
    reshard: str | int = "always"
    offload: str = "none"
    dtypes: DtypePolicy = field(default_factory=DtypePolicy)


@dataclass(frozen=True)
class Parallelized:
    """A module that was made parallel, and what it takes to make it plain again.

    Args:
        mesh: The ranks.
        plan: What is sharded with what.
        footprint: What the module was before.
        unused: What to do about parameters that a step leaves unused.
    """

    mesh: Mesh
    plan: ShardingPlan
    footprint: Footprint
    unused: UnusedParameters

    def replaced(self) -> dict[Tensor, Tensor]:
        """The module's own parameter -> what stands in its place."""
        return dict(self.footprint.replaced())

    def averaged_parameters(self, module: nn.Module) -> list[nn.Parameter]:
        """The parameters that every rank holds whole, each once, in the same order on all ranks."""
        return [parameter for name, parameter in module.named_parameters() if name in self.plan.whole]

    def undo(self, module: nn.Module) -> dict[Tensor, nn.Parameter]:
        """Make the module whole and plain on every rank. A collective. Returns sharded -> own parameter."""
        reshard_units(module)
        module.__dict__.pop(_KEY, None)
        return self.footprint.restore(whole)


_KEY = "_lightning_parallel"


def parallelized(module: nn.Module) -> Parallelized | None:
    """How `module` is parallel now, if it is: an earlier fit may have left it so."""
    return module.__dict__.get(_KEY)


def parallelize(
    module: nn.Module, mesh: Mesh, device: torch.device, policies: Policies, init: InitRecord | None = None
) -> Parallelized:
    """Make `module` parallel in place. Needs the process group; a collective.

    Args:
        module: The whole module, on the host, on the device, or recorded on the meta device.
        mesh: The ranks.
        device: This rank's device.
        policies: How.
        init: How to make the tensors that are on the meta device.

    Raises:
        ConfigurationError: For tensors that cannot be made, and for parameters whose gradients nobody reduces.
    """
    anatomy = find_layers(module, policies.layers)
    footprint = Footprint(module)

    synchronize_module(module, device)
    plan = plan_sharding(
        module, anatomy.units, root_is_unit=not policies.backward_in_step, casts=policies.dtypes.param is not None
    )
    apply_sharding(
        module,
        plan,
        mesh.sharding,
        reshard=policies.reshard,
        policy=policies.dtypes.fsdp,
        offload=build_offload_policy(policies.offload, device),
        device=device,
    )
    if init is not None:
        shards_on = device if policies.offload == "none" else torch.device("cpu")
        init.materialize(module, device, shards_on=shards_on)
    finish_sharding(module, plan, policies.step_methods)
    for method in policies.forward_methods:
        gather_in_method(module, plan, method)

    unused = UnusedParameters([module.get_submodule(path) for path in plan.units], mesh.host_group)

    footprint.close()
    for own, current in footprint.replaced():
        current.__dict__.update(vars(own))  # marks that code reads, such as `parameter.no_weight_decay`
    _audit(module, plan, mesh)
    result = Parallelized(mesh, plan, footprint, unused)
    module.__dict__[_KEY] = result
    return result


def _audit(module: nn.Module, plan: ShardingPlan, mesh: Mesh) -> None:
    if forgotten := unreduced_parameters(module, plan, mesh.sharding):
        raise ConfigurationError(
            [
                f"{len(forgotten)} trainable parameters are neither sharded nor averaged, so the ranks would drift "
                f"apart: {', '.join(forgotten[:8])}. Register them on a module, or freeze them"
            ]
        )

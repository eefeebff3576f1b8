"""Why rules do not fit a module: asked before anything of it is changed. Layer 3."""

from __future__ import annotations

from torch import nn

from lightning_parallel.module.layer_stacks import ModuleStructure, find_layers, layers_violations
from lightning_parallel.policies import Policies
from lightning_parallel.ranks.degrees import Degrees
from lightning_parallel.techniques.float8 import unfitting_violations
from lightning_parallel.techniques.pipeline.cut import cut_violations
from lightning_parallel.techniques.recompute import statistics_violations
from lightning_parallel.techniques.tensor.plan import plan_tensor, split_statistics_violations


def stack_violations(module: nn.Module, all_policies: Policies, degrees: Degrees | None = None) -> list[str]:
    """Why the policies, and the degrees that cut layers, cannot be applied to `module`; empty if they can."""
    policies = all_policies.layer
    cutting = {n: int(d) for n in ("context", "tensor", "pipeline") if (d := getattr(degrees, n, 1)) != 1}
    needs_stack: dict[str, object] = {**policies.are_on, **cutting}
    if not needs_stack or layers_violations(module, policies.layers):
        return []
    structure = find_layers(module, policies.layers)
    layers = [module.get_submodule(path) for path in structure.layers]
    if layers:
        compiles = policies.compile == "layers"
        return [
            *_cutting_violations(module, structure, all_policies, cutting),
            *unfitting_violations(layers, policies.float8),
            *statistics_violations(layers, policies.recompute, compiles=compiles),
        ]
    chosen = ", ".join(f"{name}={value!r}" for name, value in needs_stack.items())
    return [
        f"{chosen} works layer by layer, and {type(module).__name__} has no stack of repeated layers; name one "
        "with layers='path.to.the.list' (a ModuleList or Sequential), or leave it out"
    ]


def _cutting_violations(
    module: nn.Module, structure: ModuleStructure, policies: Policies, cutting: dict[str, int]
) -> list[str]:
    """Why the layers cannot be shared by so many ranks."""
    found = []
    if "tensor" in cutting:
        plan = plan_tensor(module, structure, policies.tensor_plan, degree=cutting["tensor"])
        found += [*plan.violations, *split_statistics_violations(module, plan, structure.layers)]
    if "pipeline" in cutting:
        found += cut_violations(module, structure, policies.pipeline, cutting["pipeline"])
    if len(structure.layers) != len({module.get_submodule(path) for path in structure.layers}):
        splits_sequences = "context" in cutting or ("tensor" in cutting and policies.sequence)
        found += [_REPEATED] if splits_sequences else []
    return found


_REPEATED = (
    "a layer stands at several places of a stack, so it is not known where sequences are split and joined again; give "
    "context=1 and sequence=False"
)

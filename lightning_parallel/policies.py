"""By which rules a module is made parallel. Layer 3."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lightning_parallel.dtypes import DtypePolicy
from lightning_parallel.techniques.pipeline.schedules import PipelinePolicy


@dataclass(frozen=True, kw_only=True)
class LayerPolicies:
    """What is done to each layer of the stacks, under every strategy.

    Args:
        layers: Paths of the layer stacks, where the search should not decide.
        float8: Recipe of the linear maps, such as ``"tensorwise"``.
        recompute: Which activations are computed again in backward.
        compile: ``"none"`` or ``"layers"``.
    """

    layers: str | Sequence[str] | None = None
    float8: str | None = None
    recompute: str = "none"
    compile: str = "none"

    @property
    def are_on(self) -> dict[str, str]:
        """The policies that need a stack, by name."""
        chosen = {"float8": self.float8, "recompute": self.recompute, "compile": self.compile}
        return {name: value for name, value in chosen.items() if value not in (None, "none")}


@dataclass(frozen=True, kw_only=True)
class Policies:
    """The rules by which a module is made parallel; none of them knows the module.

    Args:
        layer: What is done to each layer.
        step_methods: Methods that are called in place of the module's `forward`.
        forward_methods: Further methods, by dotted path, in which parameters are to be gathered.
        backward_in_step: Whether backward runs inside the step (manual optimization).
        reshard: When gathered parameters are freed: ``"always"``, ``"never"``, or over how many ranks they stay.
        offload: ``"none"``, ``"optimizer"`` or ``"all"``.
        dtypes: Dtypes of gathering and reducing.
        tensor_plan: Role of each linear map under tensor parallel, where the package should not decide.
        sequence: Whether ranks that share a matrix product also split the sequence between branches.
        context_attention: How ranks that share a sequence share attention, ``"ulysses"`` or ``"ring"``.
        pipeline: How a stack is cut into stages, where it is.
    """

    layer: LayerPolicies = field(default_factory=LayerPolicies)
    step_methods: Sequence[str] = ()
    forward_methods: Sequence[str] = ()
    backward_in_step: bool = False
    reshard: str | int = "always"
    offload: str = "none"
    dtypes: DtypePolicy = field(default_factory=DtypePolicy)
    tensor_plan: Mapping[str, str] | None = None
    sequence: bool = False
    context_attention: str = "ulysses"
    pipeline: PipelinePolicy = field(default_factory=PipelinePolicy)

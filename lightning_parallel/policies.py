"""Rules by which a module is made parallel and trained; none of them knows the module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from lightning_parallel.dtypes import DtypePolicy
from lightning_parallel.techniques.pipeline.schedules import PipelinePolicy


@dataclass(frozen=True, kw_only=True)
class LayerPolicies:
    """Changes to how each layer of the stacks computes, under every strategy.

    Args:
        layers: Path or paths of the layer stacks, where the search should not decide.
        float8: Recipe of the linear maps, such as ``"tensorwise"``.
        recompute: Which activations are computed again in backward.
        compile: ``"none"`` or ``"layers"``.
    """

    layers: str | list[str] | None = None
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
    """The rules of one strategy.

    Args:
        layer: How each layer computes.
        shards: Whether parameters are sharded by FSDP2; DDP, ZeRO-1 and DataParallel keep them whole.
        step_methods: Methods that are called in place of the module's `forward`.
        forward_methods: Further methods, by dotted path, in which parameters are to be gathered.
        backward_in_step: Whether backward runs inside the step (manual optimization).
        reshard: When gathered parameters are freed: ``"always"``, ``"never"``, or over how many ranks they stay.
        offload: ``"none"``, ``"optimizer"`` or ``"all"``.
        dtypes: Dtypes of gathering and reducing; ``None`` for those that belong to the Trainer's precision.
        module_dtype: The dtype to which the Trainer's precision converts the module; ``None`` leaves what it has.
        tensor_plan: Role of each linear map under tensor parallel, where the package should not decide.
        sequence: Whether ranks that share a matrix product also split the sequence between branches.
        context_attention: How ranks that share a sequence share attention, ``"ulysses"`` or ``"ring"``.
        pipeline: How a stack is cut into stages, where it is.
        accumulation_sync: When gradients are reduced within a window: ``"every"``, ``"last"`` or ``"auto"``.
        shows_gradients: Whether a hook sees gradients behind each backward.
        frees_before_backward: Whether a hook between forward and backward is to find gradients, which only shards have.
        optimizer_in_backward: Whether parameters are updated as soon as their gradient is reduced.
    """

    layer: LayerPolicies = field(default_factory=LayerPolicies)
    shards: bool = True
    step_methods: tuple[str, ...] = ()
    forward_methods: tuple[str, ...] = ()
    backward_in_step: bool = False
    reshard: str | int = "always"
    offload: str = "none"
    dtypes: DtypePolicy | None = None
    module_dtype: torch.dtype | None = None
    tensor_plan: Mapping[str, str] | None = None
    sequence: bool = False
    context_attention: str = "ulysses"
    pipeline: PipelinePolicy = field(default_factory=PipelinePolicy)
    accumulation_sync: str = "auto"
    shows_gradients: bool = False
    frees_before_backward: bool = False
    optimizer_in_backward: bool = False

    @property
    def takes_turns(self) -> bool:
        """Whether stages of a pipeline take turns: backward and updates inside of a step are not those of a part."""
        return self.backward_in_step or self.pipeline.takes_turns

    def with_updates(self, accumulation_sync: str, *, in_backward: bool) -> Policies:
        """These rules, and those by which gradients are reduced and used.

        Args:
            accumulation_sync: As the attribute.
            in_backward: As `optimizer_in_backward`.
        """
        return replace(self, accumulation_sync=accumulation_sync, optimizer_in_backward=in_backward)

    def with_gradients_shown(self) -> Policies:
        """Rules under which a hook finds, behind each backward, the gradients that one process would have."""
        sync = "every" if self.accumulation_sync == "auto" else self.accumulation_sync
        return replace(self, accumulation_sync=sync, shows_gradients=True)

    @property
    def sharding_dtypes(self) -> DtypePolicy:
        """:attr:`dtypes`, by default those of the module."""
        return self.dtypes or DtypePolicy()

    @property
    def given(self) -> dict[str, list[str]]:
        """Settings that differ from the defaults, in words, by the degree that they belong to."""
        ring = [] if self.context_attention == "ulysses" else [f"context_attention={self.context_attention!r}"]
        plan = [] if self.tensor_plan is None else ["tensor_plan"]
        sequence = ["sequence=True"] if self.sequence else []
        return {"context": ring, "tensor": plan + sequence, "pipeline": self.pipeline.given()}

"""`MeshStrategy`: any product of degrees on an unchanged LightningModule."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.plugins import Precision
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_parallel import _torch
from lightning_parallel.checkpoint.full_state import make_optimizer_whole
from lightning_parallel.compatibility import stack_violations
from lightning_parallel.dtypes import POLICIES, DtypePolicy, precision_violations
from lightning_parallel.errors import ConfigurationError
from lightning_parallel.module.layer_stacks import layers_violations
from lightning_parallel.parallelize import (
    Parallelized,
    left_over_violations,
    parallelize,
    parallelized,
)
from lightning_parallel.policies import LayerPolicies, Policies
from lightning_parallel.ranks.collectives import stacked
from lightning_parallel.ranks.degrees import Degrees, reshard_violations
from lightning_parallel.ranks.mesh import Mesh, build_mesh
from lightning_parallel.ranks.stage_owners import untag_owners
from lightning_parallel.steps import StepPolicies
from lightning_parallel.strategies.evaluation import leave_inference_mode
from lightning_parallel.strategies.module_device import set_module_device
from lightning_parallel.strategies.optimizers import adopt_optimizers
from lightning_parallel.strategies.pipeline_refusals import (
    hooked_layers_violations,
    pipelined_module_violations,
    pipelining_violations,
)
from lightning_parallel.strategies.pipelined_strategy import PipelinedStrategy, overridden_steps
from lightning_parallel.strategies.precision import sharded_precision
from lightning_parallel.strategies.refusals import (
    context_violations,
    forward_method_violations,
    idle_violations,
    in_backward_violations,
    layer_policy_violations,
    module_bytes,
    rank_share_of_host_memory,
    tensor_violations,
    unshardable_violations,
)
from lightning_parallel.techniques.accumulation import accumulation_violations
from lightning_parallel.techniques.offload import offload_violations
from lightning_parallel.techniques.pipeline.placement import Placement
from lightning_parallel.techniques.pipeline.schedules import PipelinePolicy, pipeline_violations
from lightning_parallel.techniques.sharding import abandon_step

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class MeshStrategy(PipelinedStrategy):
    """Train an unchanged LightningModule on a mesh of ranks.

    Degrees are numbers; ``"node"`` is the number of ranks on a machine.

    Args:
        replicate: Ranks that hold equal copies; ``"auto"`` is one group a machine, two groups on a single machine.
        shard: Ranks over which parameters, gradients and optimizer state are sharded; ``"auto"`` is the rest.
        context: Ranks that share one sequence inside the layer stacks (Ulysses; Jacobs et al. 2023).
        tensor: Ranks that share the matrix products and the heads of each layer (Shoeybi et al. 2019).
        pipeline: Ranks that share the stack of layers, some of its layers each.
        layers: Path or paths of the layer stacks, such as ``"model.layers"``, where the search should not decide;
            ``[]`` for no stack, which gathers all parameters around the whole step.
        forward_methods: Dotted path or paths of further methods in which parameters are to be gathered, such as
            ``"model.generate"``, for calls from outside a step.
        reshard: ``"always"`` frees gathered parameters after a layer's forward; ``"never"`` keeps them until its
            gradients are reduced (ZeRO-2); a number keeps them sharded over so many ranks.
        offload: ``"all"`` keeps parameters, gradients and optimizer state in host memory; ``"optimizer"`` keeps
            optimizer state there between updates.
        recompute: Activations that backward computes again: ``"full"``, ``"every:2"`` (in every second layer),
            ``"selective"`` (all but attention and every other matrix product), ``"budget:0.5"`` (as the compiler
            chooses).
        compile: ``"layers"`` compiles each layer of the stacks, in place.
        accumulation_sync: When gradients are reduced within an accumulation window: ``"every"`` microstep, in the
            ``"last"`` one, where whole gradients wait for it, or ``"auto"``: in the last one where these fit.
        optimizer_in_backward: Whether parameters are updated as soon as their gradient is reduced.
        schedule: In which order pipeline stages run microbatches: ``"gpipe"``, ``"1f1b"``, ``"interleaved"``,
            ``"zbv"`` or ``"dualpipev"``.
        microbatches: Parts into which a pipeline cuts the batch of a rank; ``"auto"`` is the largest divisor of its
            size that is at most twice the number of stages.
        stages: Numbers of layers of the pipeline stages, such as ``[3, 5]``; ``"auto"`` balances parameters, ``"time"``
            the time that layers take, as measured before the first training step.
        virtual_stages: Pipeline stages of each rank, with ``schedule="interleaved"``.
        float8: Recipe of the stacks' linear maps, ``"tensorwise"`` or ``"rowwise"``; needs the extra ``float8``.
        tensor_plan: How linear maps are split under ``tensor``, where the package should not decide: the end of a
            path, in which ``*`` is one name -> ``"colwise"``, ``"rowwise"``, ``"replicate"``, or ``"vocab"`` for an
            embedding or head.
        sequence: Whether ranks that share matrix products also split the sequence between branches, so that norms,
            dropout and residuals take memory and time once (Korthikanti et al. 2022).
        context_attention: How ranks that share a sequence share attention: ``"ulysses"`` exchanges positions for heads,
            ``"ring"`` sends keys and values round (Liu et al. 2023), for any number of heads, without masks.
        precision_policy: Dtypes of gathering and reducing, in place of those that belong to `Trainer(precision=...)`.
        process_group_backend: ``"nccl"``, ``"gloo"``...; by default what fits the device.
        timeout: How long a collective waits for a missing rank; seconds or a timedelta.

    Raises:
        ConfigurationError: From `Trainer(...)` or at the start of `fit`, with every reason at once.

    Example:
        >>> Trainer(strategy=MeshStrategy(replicate=2, shard=4), devices=8)
    """

    def __init__(
        self,
        *,
        replicate: int | Literal["auto", "node"] = 1,
        shard: int | Literal["auto", "node"] = "auto",
        context: int | Literal["node"] = 1,
        tensor: int | Literal["auto", "node"] = 1,
        pipeline: int | Literal["node"] = 1,
        layers: str | list[str] | None = None,
        forward_methods: str | Sequence[str] = (),
        reshard: int | str = "always",
        offload: str = "none",
        recompute: str = "none",
        compile: str = "none",
        accumulation_sync: str = "auto",
        optimizer_in_backward: bool = False,
        schedule: str = "1f1b",
        microbatches: int | Literal["auto"] = "auto",
        stages: list[int] | Literal["auto", "time"] = "auto",
        virtual_stages: int = 1,
        float8: str | None = None,
        tensor_plan: dict[str, str] | None = None,
        sequence: bool = False,
        context_attention: str = "ulysses",
        precision_policy: DtypePolicy | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | float = default_pg_timeout,
    ) -> None:
        super().__init__(process_group_backend=process_group_backend, timeout=timeout)
        self._degrees = Degrees(replicate=replicate, shard=shard, context=context, tensor=tensor, pipeline=pipeline)
        self._layer_policies = LayerPolicies(layers=layers, float8=float8, recompute=recompute, compile=compile)
        self._step_policies = StepPolicies(
            accumulation_sync=accumulation_sync,
            offloads_optimizer=offload == "optimizer",
            updates_in_backward=optimizer_in_backward,
        )
        self._pipeline_policy = PipelinePolicy(
            schedule=schedule,
            microbatches=microbatches,
            stages=stages if isinstance(stages, str) else tuple(stages),
            virtual_stages=virtual_stages,
        )
        self._forward_methods = (forward_methods,) if isinstance(forward_methods, str) else tuple(forward_methods)
        self._reshard = reshard
        self._offload = offload
        self._tensor_plan = tensor_plan
        self._sequence = sequence
        self._context_attention = context_attention
        self._precision_policy = precision_policy
        self._mesh: Mesh | None = None
        self._has_told_offload = False
        self._inference_modes: list[tuple[Any, bool]] = []
        self._while_set_up = contextlib.ExitStack()

    _defers_init = True

    # Refusals ---------------------------------------------------------------------------------------------------

    @override
    def set_up_violations(self) -> list[str]:
        found = super().set_up_violations()
        try:
            degrees = self.degrees
        except ConfigurationError as error:
            return [*found, *error.violations, *self._option_violations(None)]
        if isinstance(degrees.pipeline, int) and degrees.pipeline != 1:
            found += pipeline_violations(self._pipeline_policy, degrees.pipeline)
            found += pipelining_violations(
                degrees,
                offload=self._offload,
                updates_in_backward=self._step_policies.updates_in_backward,
                forward_methods=self._forward_methods,
            )
        return [*found, *self._option_violations(degrees)]

    def _option_violations(self, degrees: Degrees | None) -> list[str]:
        shard = degrees.shard if degrees is not None and isinstance(degrees.shard, int) else None
        found = reshard_violations(self._reshard, shard) if shard is not None else []
        if degrees is not None:
            found += tensor_violations(degrees, self._layer_policies, sequence=self._sequence)
            found += context_violations(degrees, attention=self._context_attention, float8=self._layer_policies.float8)
        found += idle_violations(self._degrees, self._given_options())
        found += offload_violations(self._offload)
        found += layer_policy_violations(self._layer_policies, self.root_device)
        found += accumulation_violations(self._step_policies.accumulation_sync)
        return [*found, *precision_violations(self.precision_plugin.precision)]

    def _given_options(self) -> dict[str, list[str]]:
        """What was given beside the defaults, by the degree that it belongs to."""
        ring = [] if self._context_attention == "ulysses" else [f"context_attention={self._context_attention!r}"]
        plan = [] if self._tensor_plan is None else ["tensor_plan"]
        sequence = ["sequence=True"] if self._sequence else []
        return {"context": ring, "tensor": plan + sequence, "pipeline": self._pipeline_policy.given()}

    @override
    def module_violations(self, module: LightningModule, *, is_fitting: bool) -> list[str]:
        if left := left_over_violations(module, self._policies(module), self.degrees):
            return left
        found = super().module_violations(module, is_fitting=is_fitting)
        if parallelized(module) is None:  # one that is still sharded was looked at as its author wrote it
            unknown = layers_violations(module, self._layer_policies.layers)
            if self.degrees.pipeline != 1 and not unknown:
                found += hooked_layers_violations(module, self._layer_policies.layers)
            found += unknown
            found += stack_violations(module, self._policies(module), self.degrees)
            found += unshardable_violations(module)
            found += forward_method_violations(module, self._forward_methods)
        if self.degrees.pipeline != 1:
            found += pipelined_module_violations(module)
        if self._step_policies.updates_in_backward and is_fitting:
            found += in_backward_violations(module, offloads_optimizer=self._step_policies.offloads_optimizer)
        return found

    # The mesh ---------------------------------------------------------------------------------------------------

    @property
    def degrees(self) -> Degrees:
        """The resolved degrees; they need the devices, so a Trainer."""
        return self._degrees.resolve(self.num_nodes * self.num_processes, self.num_processes)

    @property
    def mesh(self) -> Mesh:
        """The ranks by purpose; exists once `fit`, `validate`, `test` or `predict` has begun."""
        if self._mesh is None:
            raise RuntimeError("the mesh exists only once fit, validate, test or predict has begun")
        return self._mesh

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.degrees.data, "rank": self.mesh.data_rank}

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        # Ranks that share samples have the same values, and count once.
        return super().reduce(tensor, group or self.mesh.data.get_group(), reduce_op)

    @override
    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        # Without a group, LightningModule.all_gather names that of the process. Ranks that share samples count once.
        if group not in (None, dist.group.WORLD):
            return super().all_gather(tensor, group, sync_grads)
        # torch's gather has a backward only for all ranks of the process.
        with torch.set_grad_enabled(torch.is_grad_enabled() and sync_grads):
            return stacked(tensor, self.mesh.data.get_group())

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        count = int(super().reduce(torch.tensor(int(decision), device=self.root_device), dist.group.WORLD, "sum"))
        return count == self.world_size if all else count > 0

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        if self._mesh is None:
            innermost = "pipeline" if self._degrees.pipeline == "node" else "tensor"
            device_type = self.root_device.type
            self._mesh = build_mesh(self.degrees, device_type, innermost=innermost, timeout=self._timeout)
        assert self.lightning_module is not None
        self.lightning_module._device_mesh = self._mesh.devices

    @property
    def updates_in_backward(self) -> bool:
        """Whether parameters are updated before all gradients are there, so that nothing can be done to these."""
        return self._step_policies.updates_in_backward

    @property
    def cuts_batches(self) -> bool:
        """Whether the batch of a rank runs in parts, each of which is averaged over its samples alone."""
        return self._degrees.pipeline != 1

    # The module -------------------------------------------------------------------------------------------------

    @property
    @override
    def precision_plugin(self) -> Precision:
        return self._precision_plugin or Precision()

    @precision_plugin.setter
    @override
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        self._precision_plugin = sharded_precision(precision_plugin)

    @override
    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        module = self.lightning_module
        assert module is not None
        self.refuse(left_over_violations(module, self._policies(module), self.degrees))
        left = parallelized(module)
        self._parallelized = left or self._parallelize(module)
        self._while_set_up.enter_context(_torch.fsdp.data_of_shards_set())
        set_module_device(module, self.root_device)
        self._steps = self._make_steps(module, self._parallelized)
        self._inference_modes = leave_inference_mode(trainer)
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        self._has_cut_optimizers = is_fitting or left is not None
        if is_fitting:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if is_fitting and self._offload != "all":
            _optimizers_to_device(self.optimizers, self.root_device)
        self._steps.adopt(self._training_optimizers, self._lightning_optimizers)
        self._attach_pipeline()

    def _parallelize(self, module: LightningModule, placement: Placement | None = None) -> Parallelized:
        if self._offload != "none" and self.root_device.type == "cpu" and not self._has_told_offload:
            self._has_told_offload = True
            rank_zero_info("offload: the device is the host, so there is nothing to offload; sharding only")
        converted = self.precision_plugin.convert_module(module)
        assert converted is module
        if self._layer_sync is not None:
            self._layer_sync.apply(module)
        record = self._deferral.record if placement is None else None
        return parallelize(module, self.mesh, self.root_device, self._policies(module), record, placement)

    def _policies(self, module: LightningModule) -> Policies:
        return Policies(
            layer=self._layer_policies,
            step_methods=overridden_steps(module),
            forward_methods=self._forward_methods,
            backward_in_step=not module.automatic_optimization,
            reshard=self._reshard,
            offload=self._offload,
            dtypes=self._precision_policy or POLICIES[str(self.precision_plugin.precision)],
            tensor_plan=self._tensor_plan,
            sequence=self._sequence,
            context_attention=self._context_attention,
            pipeline=self._pipeline_policy,
        )

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        self._reset_optimizers_and_schedulers()
        super().setup_optimizers(trainer)
        assert self.lightning_module is not None
        assert self._parallelized is not None
        adopt_optimizers(self.optimizers, self.lightning_module, self._parallelized.replaced())

    @override
    def teardown(self) -> None:
        self._while_set_up.close()
        for loop, mode in self._inference_modes:
            loop.inference_mode = mode
        self._inference_modes = []
        module = self.lightning_module
        if self._steps is not None:
            self._steps.close()
        self._detach_pipeline()
        if module is not None and self._parallelized is not None:
            trainer = module._trainer
            is_interrupted = trainer is not None and trainer.state.status == TrainerStatus.INTERRUPTED
            if is_interrupted:
                abandon_step(module)
            # After an error other ranks may be gone: a collective would wait for them until it times out.
            if not is_interrupted or self.world_size == 1:
                self._make_plain(module, self._parallelized)
        self._parallelized = self._steps = None
        super().teardown()

    def _is_too_large(self, module: LightningModule) -> bool:
        """Whether a rank should not hold the whole of `module`."""
        return module_bytes(module) > rank_share_of_host_memory(self.num_processes) // 4

    def _make_plain(self, module: LightningModule, parallelized: Parallelized) -> None:
        is_changed = bool(parallelized.replaced()) or parallelized.cut is not None
        if is_changed and self._is_too_large(module):
            size, share = module_bytes(module), rank_share_of_host_memory(self.num_processes)
            rank_zero_info(
                f"the module stays sharded: whole it takes {size / 2**30:.1f} GiB, more than a quarter of a rank's "
                f"{share / 2**30:.1f} GiB of host memory. full_state_dict(trainer) and checkpoints work as before"
            )
            return
        own = parallelized.undo(module)
        if self._layer_sync is not None:
            self._layer_sync.revert(module)
        for optimizer in self._training_optimizers:
            make_optimizer_whole(optimizer, own)
        untag_owners(module)  # states were gathered by these notes; the next fit makes its own

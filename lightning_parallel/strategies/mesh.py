"""`MeshStrategy`: any product of degrees on an unchanged LightningModule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch.plugins import Precision
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from lightning_parallel import _lightning, _torch
from lightning_parallel.dtypes import DtypePolicy, precision_violations
from lightning_parallel.parallelize import added_violations, left_over_violations, parallelized
from lightning_parallel.policies import LayerPolicies, Policies
from lightning_parallel.ranks.degrees import Degrees
from lightning_parallel.step_hooks import StepHooks
from lightning_parallel.strategies.first_calls import TRAINING
from lightning_parallel.strategies.host_init import tensors_on_host
from lightning_parallel.strategies.launchers import RankOptions
from lightning_parallel.strategies.mesh_refusals import mesh_module_violations, mesh_violations, unbuilt_violations
from lightning_parallel.strategies.meshed_strategy import MeshedStrategy
from lightning_parallel.strategies.module_device import set_module_device
from lightning_parallel.strategies.optimizers import adopt_optimizers
from lightning_parallel.strategies.parallel_module import ParallelModule
from lightning_parallel.strategies.precision import module_dtype, sharded_precision, sharding_dtypes
from lightning_parallel.strategies.saving_strategy import Saving
from lightning_parallel.strategies.shard_notes import add_shard_notes
from lightning_parallel.strategies.while_set_up import OpenContexts, while_set_up
from lightning_parallel.techniques.pipeline.schedules import PipelinePolicy

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class MeshStrategy(MeshedStrategy):
    """Train an unchanged LightningModule on a mesh of ranks. A degree ``"node"`` is the number of ranks on a machine.

    Args:
        replicate: Ranks that hold equal copies; ``"auto"`` is one group a machine, two groups on a single machine.
        shard: Ranks over which parameters, gradients and optimizer state are sharded; ``"auto"`` is the rest.
        context: Ranks that share one sequence inside the layer stacks (Ulysses; Jacobs et al. 2023).
        tensor: Ranks that share the matrix products and the heads of each layer (Shoeybi et al. 2019).
        pipeline: Ranks that share the stack of layers, some of its layers each.
        layers: Path or paths of the layer stacks, if no search should decide; ``[]`` gathers all parameters at once.
        forward_methods: Dotted path or paths of further methods in which parameters are to be gathered, such as
            ``"model.generate"``, for calls from outside a step.
        reshard: ``"always"`` frees gathered parameters after a layer's forward; ``"never"`` keeps them until its
            gradients are reduced (ZeRO-2); a number keeps them sharded over so many ranks.
        offload: What is in host memory: ``"all"`` state, or that of the ``"optimizer"`` between updates.
        recompute: Activations that backward computes again: ``"full"``, ``"every:2"`` (in every second layer),
            ``"selective"`` (all but attention and every other product), ``"budget:0.5"`` (as the compiler chooses).
        compile: ``"layers"`` compiles each layer of the stacks, in place.
        accumulation_sync: When a window's gradients are reduced: in ``"every"`` microstep, in the ``"last"`` one, for
            which whole gradients wait, or ``"auto"``: in the last one where these fit.
        optimizer_in_backward: Whether parameters are updated as soon as their gradient is reduced.
        schedule: Order of a pipeline's stages: ``"gpipe"``, ``"1f1b"``, ``"interleaved"``, ``"zbv"``, ``"dualpipev"``;
            ``"turns"`` runs whole batches, one stage at a time, as it does where the module optimizes manually.
        microbatches: Parts of a rank's batch in a pipeline; ``"auto"`` is the largest divisor up to twice the stages.
        stages: Layers of each pipeline stage, such as ``[3, 5]``; ``"auto"`` balances parameters, ``"time"`` times.
        virtual_stages: Pipeline stages of each rank, with ``schedule="interleaved"``.
        loss: Whether a pipeline computes head and loss once for the whole ``"batch"``, exact for any loss, or for each
            ``"microbatch"``, exact for means of equally weighted samples; ``"auto"``: the second where both are equal.
        float8: Recipe of the stacks' linear maps, ``"tensorwise"`` or ``"rowwise"``; needs the extra ``float8``.
        tensor_plan: How ``tensor`` splits linear maps, where the package should not decide: the end of a path (``*`` is
            one name) -> ``"colwise"``, ``"rowwise"``, ``"replicate"``, or ``"vocab"`` for an embedding or head.
        sequence: Whether ranks that share matrix products also split the sequence between branches, so that norms,
            dropout and residuals take memory and time once (Korthikanti et al. 2022).
        context_attention: How ranks that share a sequence share attention: ``"ulysses"`` exchanges positions for heads,
            ``"ring"`` sends keys and values round (Liu et al. 2023), for any number of heads.
        precision_policy: Dtypes of gathering and reducing, in place of those that belong to `Trainer(precision=...)`.
        process_group_backend: ``"nccl"``, ``"gloo"``...; by default what fits the device.
        timeout: How long a collective waits for a missing rank; seconds or a timedelta.
        hang_timeout: After how long ranks that wait for each other in vain are ended, and told where; 0 is never.
        check: The proof of the first step, and of equal copies: ``"auto"`` (what fits), ``"first_step"``, ``"off"``.
        start_method: ``"popen"`` runs the script for each rank, ``"fork"`` serves notebooks; ``"spawn"`` and others.
        checkpoint: ``"whole"`` (a file), ``"sharded"`` (a folder), ``"auto"``; ``"async"``, ``"async-whole"``...
        on_save_error: Where a checkpoint cannot be written, ``"raise"`` ends the run, ``"warn"`` goes on without it.
        stop_status: Exit status of a run that a signal has ended; 143 is the one of SIGTERM.

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
        loss: Literal["auto", "batch", "microbatch"] = "auto",
        float8: str | None = None,
        tensor_plan: dict[str, str] | None = None,
        sequence: bool = False,
        context_attention: str = "ulysses",
        precision_policy: DtypePolicy | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | float = default_pg_timeout,
        hang_timeout: timedelta | float | None = 300.0,
        check: str = "auto",
        start_method: str = "popen",
        checkpoint: str = "auto",
        on_save_error: str = "raise",
        stop_status: int = 143,
    ) -> None:
        policies = Policies(
            layer=LayerPolicies(layers=layers, float8=float8, recompute=recompute, compile=compile),
            forward_methods=(forward_methods,) if isinstance(forward_methods, str) else tuple(forward_methods),
            reshard=reshard,
            offload=offload,
            dtypes=precision_policy,
            tensor_plan=tensor_plan,
            sequence=sequence,
            context_attention=context_attention,
            pipeline=PipelinePolicy(schedule, microbatches, stages, virtual_stages, loss),
        ).with_updates(accumulation_sync, in_backward=optimizer_in_backward)
        degrees = Degrees(replicate=replicate, shard=shard, context=context, tensor=tensor, pipeline=pipeline)
        ranks = RankOptions(process_group_backend, timeout, start_method, hang_timeout)
        super().__init__(policies, degrees, ranks, check=check, saving=Saving(on_save_error, stop_status, checkpoint))

    defers_init = True
    _parallel: ParallelModule | None = None
    _while_set_up = OpenContexts()  # of no use before `setup`
    tensor_init_context = tensors_on_host

    @override
    def set_up_violations(self) -> list[str]:
        ranks = self.num_nodes * self.num_processes, self.num_processes
        found = mesh_violations(self._degrees, *ranks, self._policies, self.root_device, syncs=bool(self._layer_sync))
        return [*super().set_up_violations(), *found, *precision_violations(self.precision_plugin.precision)]

    @override
    def module_violations(self, module: LightningModule, *, is_fitting: bool) -> list[str]:
        if left := left_over_violations(module, self.degrees, self.policies_for(module)):
            return left
        plan = None if parallelized(module) is not None else self.plan_for(module)
        further = mesh_module_violations(module, plan, self._policies, cuts=self.cuts_stack, is_fitting=is_fitting)
        return [*super().module_violations(module, is_fitting=is_fitting), *further]

    @override
    def unbuilt_violations(self, module: LightningModule, *, is_fitting: bool) -> list[str]:
        where = {"replaces": self.num_nodes * self.num_processes > 1, "cuts": self.cuts_stack}
        return unbuilt_violations(module, self._policies, **where, is_fitting=is_fitting)

    @property
    @override
    def steps(self) -> StepHooks:
        return self._steps if self._parallel is None else self._parallel.steps

    @override
    def policies_for(self, module: LightningModule) -> Policies:
        precision = self.precision_plugin
        dtypes = self._policies.dtypes or sharding_dtypes(precision)
        return replace(super().policies_for(module), dtypes=dtypes, module_dtype=module_dtype(precision))

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
        self._while_set_up = OpenContexts()
        self._while_set_up.enter_context(_torch.random_states.states_of_ranks(self.mesh.devices))
        self._parallel = ParallelModule(self, self.mesh)
        replaces = self._parallel.current.plan.replaces_parameters
        self._while_set_up.enter_context(
            while_set_up(trainer, self.module, self.mesh, self.on_write, replaces=replaces)
        )
        set_module_device(self.module, self.root_device)
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        self._has_cut_optimizers = is_fitting or self._parallel.was_left
        if is_fitting:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if is_fitting and self._policies.offload != "all":
            _lightning.move_optimizers(self.optimizers, self.root_device)
        self._parallel.attach(self.optimizers if self._has_cut_optimizers else [], self._lightning_optimizers)
        self.first_step.note()

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        assert self._parallel is not None
        self._reset_optimizers_and_schedulers()
        super().setup_optimizers(trainer)
        adopt_optimizers(self.optimizers, self.module, self._parallel.current.replaced())

    @override
    def before_step(self, name: str, args: Sequence[Any]) -> None:
        # In the sanity check before a fit, layers that wait for the first training step are whole.
        if self._parallel is not None and (name == TRAINING or self.module.trainer.state.fn != TrainerFn.FITTING):
            self._parallel.see_layers(name, args)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self.refuse(added_violations(self.module) if batch_idx == 0 else [])  # by hooks at the begin of an epoch
        self.before_step(TRAINING, (batch, batch_idx))

    @override
    def teardown(self) -> None:
        self._while_set_up.close()
        if self._parallel is not None:
            self._parallel.close(is_interrupted=_lightning.was_interrupted(self.module))
        self._parallel = None
        super().teardown()

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if self._parallel is not None:
            add_shard_notes(exception)

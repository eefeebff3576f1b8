"""`ddp_custom`: every rank holds the whole model, gradients are averaged while backward runs."""

from __future__ import annotations

import functools
from datetime import timedelta
from itertools import chain
from typing import TYPE_CHECKING, Literal

from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_parallel import _lightning, _torch
from lightning_parallel.checkpoint.full_state import whole
from lightning_parallel.module.snapshot import Snapshot
from lightning_parallel.parallelize import transform_layers
from lightning_parallel.policies import LayerPolicies, Policies
from lightning_parallel.step_hooks import StepHooks
from lightning_parallel.strategies.ddp_steps import DDPSteps
from lightning_parallel.strategies.launchers import RankOptions
from lightning_parallel.strategies.lock_step_strategy import LockStepStrategy
from lightning_parallel.strategies.optimizers import adopt_optimizers
from lightning_parallel.strategies.refusals import layer_policy_violations, sharded_elsewhere_violations
from lightning_parallel.strategies.saving_strategy import Saving
from lightning_parallel.techniques.accumulation import accumulation_violations
from lightning_parallel.techniques.compression import comm_hook_violations, races_with_search, register_comm_hook
from lightning_parallel.techniques.offload import replicated_offload_violations
from lightning_parallel.techniques.replicate import synchronize_module

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class DDPStrategy(LockStepStrategy):
    """`torch.nn.parallel.DistributedDataParallel` on an unchanged LightningModule (Li et al. 2020).

    Args:
        comm_hook: How gradients travel: ``"none"`` as they are, ``"fp16"`` and ``"bf16"`` in half the bytes (bf16 needs
            NCCL), ``"powersgd"`` as low-rank factors (Vogels et al. 2019).
        powersgd_rank: The rank of those factors; only with ``comm_hook="powersgd"``.
        static_graph: Whether each step uses the same parameters in the same way, which lets DDP plan ahead.
        bucket_cap_mb: MiB of gradients in one collective; torch's default of 25 if not given.
        gradient_as_bucket_view: Whether gradients live in the buckets, which saves a copy and its memory.
        find_unused_parameters: Whether DDP looks in each step for parameters that it leaves unused, which takes time.
            ``"auto"`` looks once, at the gradients of the first step, and goes on where some rank has left any out;
            under manual optimization, where a step uses those of one optimizer at a time, it always looks.
        layers: Path or paths of the layer stacks, where the search should not decide.
        recompute: Activations that backward computes again: ``"full"``, ``"every:2"``, ``"selective"`` or
            ``"budget:0.5"`` (see :class:`MeshStrategy`).
        compile: ``"layers"`` compiles each layer of the stacks, in place.
        float8: Recipe of the stacks' linear maps, ``"tensorwise"`` or ``"rowwise"``; needs the extra ``float8``.
        offload: ``"optimizer"`` keeps optimizer state in host memory between updates.
        accumulation_sync: When gradients are reduced within an accumulation window: in the ``"last"`` microstep (what
            ``"auto"`` is here, because gradients are whole anyway), or in ``"every"`` one.
        process_group_backend: ``"nccl"``, ``"gloo"``...; by default what fits the device.
        timeout: How long a collective waits for a missing rank; seconds or a timedelta.
        hang_timeout: After how long ranks that wait for each other in vain are ended, and told where; 0 is never.
        check: The proof of the first step, and of equal copies: ``"auto"`` (what fits), ``"first_step"``, ``"off"``.
        start_method: How ranks are started: ``"popen"`` runs the script again for each; ``"fork"`` serves notebooks,
            ``"spawn"`` and ``"forkserver"`` functions that can be pickled.
        checkpoint: ``"whole"``, a file that rank 0 writes; ``"sharded"``, a folder to which each rank writes its part;
            ``"auto"``: the first where all state fits in a quarter of a rank's share of the host's memory; ``"async"``,
            ``"async-whole"``, ``"async-sharded"``: the same from copies in host memory, while training goes on.
        on_save_error: Where a checkpoint cannot be written, ``"raise"`` ends the run, ``"warn"`` goes on without it.
        stop_status: Exit status of a run that a signal has ended; 143 is the one of SIGTERM.

    Example:
        >>> Trainer(strategy=DDPStrategy(comm_hook="fp16"), devices=2)
    """

    def __init__(
        self,
        *,
        comm_hook: str = "none",
        powersgd_rank: int | None = None,
        static_graph: bool = False,
        bucket_cap_mb: float | None = None,
        gradient_as_bucket_view: bool = True,
        find_unused_parameters: bool | Literal["auto"] = "auto",
        layers: str | list[str] | None = None,
        recompute: str = "none",
        compile: str = "none",
        float8: str | None = None,
        offload: str = "none",
        accumulation_sync: str = "auto",
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
            shards=False,
            offload=offload,
            accumulation_sync=accumulation_sync,
        )
        ranks = RankOptions(process_group_backend, timeout, start_method, hang_timeout)
        super().__init__(policies, ranks, check=check, saving=Saving(on_save_error, stop_status, checkpoint))
        self._comm_hook = comm_hook
        self._powersgd_rank = powersgd_rank
        self._find_unused_parameters = find_unused_parameters
        self._ddp_options = {
            "static_graph": static_graph,
            "bucket_cap_mb": bucket_cap_mb,
            "gradient_as_bucket_view": gradient_as_bucket_view,
        }
        self._layers_before: Snapshot | None = None
        self._forward_redirection = _lightning.DDPForwardRedirection()

    @override
    def set_up_violations(self) -> list[str]:
        return [
            *super().set_up_violations(),
            *self._comm_hook_violations(),
            *replicated_offload_violations(self._policies.offload),
            *accumulation_violations(self._policies.accumulation_sync),
            *layer_policy_violations(self._policies.layer, self.root_device),
        ]

    def _comm_hook_violations(self) -> list[str]:
        finds = self._find_unused_parameters is True
        return comm_hook_violations(self._comm_hook, self._powersgd_rank, self.chosen_backend(), finds_unused=finds)

    @property
    @override
    def sends_tensors(self) -> bool:
        return True  # torch's DDP does so on one rank, too

    @override
    def module_violations(self, module: LightningModule, *, is_fitting: bool) -> list[str]:
        found = [*super().module_violations(module, is_fitting=is_fitting), *self.plan_for(module).violations]
        return [*found, *sharded_elsewhere_violations(self, module)]

    @property
    @override
    def left_out(self) -> set[str]:
        return _torch.ddp.names_left_out(self.module)

    @override
    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        module, is_fitting = self.module, trainer.state.fn == TrainerFn.FITTING
        plan = self.plan_for(module)
        if is_fitting and self._layer_sync is not None:
            self.model = self._layer_sync.apply(module)
        self.precision_plugin.convert_module(module)
        self.model_to_device()
        self._layers_before = transform_layers(module, plan.structure, plan.policies.layer)
        if is_fitting:
            self._steps = DDPSteps(
                plan.policies,
                module,
                wrap=self._wrap,
                set_model=self._set_model,
                find_unused=self._finds_unused(module),
                tell=rank_zero_info,
            )
            self.setup_optimizers(trainer)
        else:
            synchronize_module(module, self.root_device)
        self.setup_precision_plugin()
        if is_fitting:
            _lightning.move_optimizers(self.optimizers, self.root_device)
            self._steps.adopt(self.optimizers)
        self.first_step.note()

    def _set_model(self, model: nn.Module) -> None:
        self.model = model

    def _finds_unused(self, module: LightningModule) -> bool | None:
        """Whether DDP looks for unused parameters in each step; ``None`` where the first one is to decide."""
        if self._find_unused_parameters != "auto":
            return self._find_unused_parameters
        if not module.automatic_optimization:
            return True
        # A static graph sees by itself what its first step leaves.
        is_off = self._ddp_options["static_graph"] or races_with_search(self._comm_hook, self.chosen_backend())
        return False if is_off else None

    def _wrap(self, module: LightningModule, find_unused: bool, is_synced: bool) -> DistributedDataParallel:
        frozen = ((name, p) for name, p in module.named_parameters() if not p.requires_grad)
        kept = {name: tensor.detach() for name, tensor in chain(frozen, module.named_buffers())}
        odd = {name: tensor for name, tensor in kept.items() if not _torch.dense_parts.is_dense(tensor)}
        with _torch.ddp.left_out(module, odd):
            wrapped = DistributedDataParallel(
                module,
                # Lightning moves batches. With a device, DDP would move again what a user has left on the host, and
                # raise for a `defaultdict`.
                device_ids=None,
                find_unused_parameters=find_unused,
                init_sync=not is_synced,
                **self._ddp_options,  # type: ignore[arg-type]
            )
        send = functools.partial(_torch.groups.broadcast_tensors, source=0, group=wrapped.process_group)
        if not is_synced:
            send(list(odd.values()))
        _torch.ddp.send_buffers(wrapped, send)
        register_comm_hook(wrapped, self._comm_hook, powersgd_rank=self._powersgd_rank)
        return wrapped

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        adopt_optimizers(self.optimizers, self.module)

    @override
    def teardown(self) -> None:
        if isinstance(self._steps, DDPSteps):
            self._steps.unwrap()
        if self._layers_before is not None:
            self._layers_before.restore(whole)
            self._layers_before = None
        if self.lightning_module is not None and self._layer_sync is not None:
            self.model = self._layer_sync.revert(self.lightning_module)
        super().teardown()
        self._steps = StepHooks(self._policies)

"""`ddp_custom`: every rank holds the whole model, gradients are averaged while backward runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch.distributed as dist
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.overrides.distributed import prepare_for_backward
from lightning.pytorch.strategies.ddp import _DDPForwardRedirection
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_parallel.checkpoint.full_state import whole
from lightning_parallel.compatibility import stack_violations
from lightning_parallel.errors import check
from lightning_parallel.module.layer_stacks import find_layers, layers_violations
from lightning_parallel.module.snapshot import Snapshot
from lightning_parallel.parallelize import transform_layers
from lightning_parallel.policies import LayerPolicies, Policies
from lightning_parallel.strategies.optimizers import adopt_optimizers
from lightning_parallel.strategies.process_group import ProcessGroupStrategy
from lightning_parallel.strategies.refusals import layer_policy_violations, sharded_elsewhere_violations
from lightning_parallel.techniques.accumulation import accumulation_violations
from lightning_parallel.techniques.compression import comm_hook_violations, register_comm_hook
from lightning_parallel.techniques.offload import OffloadedState, replicated_offload_violations
from lightning_parallel.techniques.replicate import reduce_gradients, synchronize_module

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

_UNUSED = "Expected to have finished reduction in the prior iteration"


class DDPStrategy(ProcessGroupStrategy):
    """`torch.nn.parallel.DistributedDataParallel` on an unchanged LightningModule (Li et al. 2020).

    Args:
        comm_hook: How gradients travel: ``"none"`` as they are, ``"fp16"`` and ``"bf16"`` in half the bytes (bf16 needs
            NCCL), ``"powersgd"`` as low-rank factors (Vogels et al. 2019).
        powersgd_rank: The rank of those factors; only with ``comm_hook="powersgd"``.
        static_graph: Whether each step uses the same parameters in the same way, which lets DDP plan ahead.
        bucket_cap_mb: MiB of gradients in one collective; torch's default of 25 if not given.
        gradient_as_bucket_view: Whether gradients live in the buckets, which saves a copy and its memory.
        find_unused_parameters: Whether a step may leave parameters unused; ``"auto"`` is yes under manual optimization,
            where a step uses those of one optimizer at a time, and no otherwise, because the search takes time.
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
    ) -> None:
        super().__init__(process_group_backend=process_group_backend, timeout=timeout)
        self._comm_hook = comm_hook
        self._powersgd_rank = powersgd_rank
        self._layer_policies = LayerPolicies(layers=layers, float8=float8, recompute=recompute, compile=compile)
        self._layers_before: Snapshot | None = None
        self._offload = offload
        self._offloaded: list[OffloadedState] = []
        self._accumulation_sync = accumulation_sync
        self._is_held = self._has_held = False
        self._find_unused_parameters = find_unused_parameters
        self._ddp_options = {
            "static_graph": static_graph,
            "bucket_cap_mb": bucket_cap_mb,
            "gradient_as_bucket_view": gradient_as_bucket_view,
        }
        self._forward_redirection = _DDPForwardRedirection()
        self._own_forward = False
        self._reduced: set[nn.Parameter] = set()

    @override
    def set_up_violations(self) -> list[str]:
        hook = comm_hook_violations(self._comm_hook, self._powersgd_rank, self.chosen_backend())
        hook += replicated_offload_violations(self._offload)
        found = [*super().set_up_violations(), *hook, *accumulation_violations(self._accumulation_sync)]
        return found + layer_policy_violations(self._layer_policies, self.root_device)

    @override
    def module_violations(self, module: LightningModule, *, is_fitting: bool) -> list[str]:
        found = super().module_violations(module, is_fitting=is_fitting)
        found += layers_violations(module, self._layer_policies.layers) or stack_violations(
            module, Policies(layer=self._layer_policies)
        )
        return [*found, *sharded_elsewhere_violations(self, module)]

    @override
    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        module = self.lightning_module
        assert module is not None
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        if is_fitting and self._layer_sync is not None:
            self.model = self._layer_sync.apply(module)
        self.precision_plugin.convert_module(module)
        self.model_to_device()
        check(
            stack_violations(module, Policies(layer=self._layer_policies))
        )  # one made in configure_model is only known now
        structure = find_layers(module, self._layer_policies.layers)
        self._layers_before = transform_layers(module, structure, self._layer_policies)
        if is_fitting:
            self.model = self._wrap(module)
            self.setup_optimizers(trainer)
        else:
            synchronize_module(module, self.root_device)
        self.setup_precision_plugin()
        if is_fitting:
            _optimizers_to_device(self.optimizers, self.root_device)
            if self._offload == "optimizer":
                self._offloaded = [OffloadedState(optimizer) for optimizer in self.optimizers]

    def _wrap(self, module: LightningModule) -> DistributedDataParallel:
        self._own_forward = self._own_forward or (not self._reduced and "forward" in vars(module))
        find = self._find_unused_parameters
        device = self.root_device
        wrapped = DistributedDataParallel(
            module,
            device_ids=None if device.type == "cpu" else [device.index],
            find_unused_parameters=not module.automatic_optimization if find == "auto" else find,
            **self._ddp_options,  # type: ignore[arg-type]
        )
        register_comm_hook(wrapped, self._comm_hook, powersgd_rank=self._powersgd_rank)
        self._reduced = _trainable(module)
        return wrapped

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        module = self.lightning_module
        assert module is not None
        trainable = _trainable(module)
        # Under manual optimization, a step freezes the parameters of the other optimizers for a while.
        is_other = trainable != self._reduced if module.automatic_optimization else not trainable <= self._reduced
        if is_other and isinstance(self.model, DistributedDataParallel):
            self._reduce_held()  # what is frozen in the middle of a window is reduced by nobody afterwards
            self.model = module  # DDP reduces what was trainable when it was made, and waits for all of it
            self.model = self._wrap(module)
        return super().training_step(*args, **kwargs)

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        assert self.lightning_module is not None
        adopt_optimizers(self.optimizers, self.lightning_module)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        for offloaded in self._offloaded:
            offloaded.store()

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        assert self.lightning_module is not None
        if isinstance(self.model, DistributedDataParallel) and not self.lightning_module.automatic_optimization:
            prepare_for_backward(self.model, closure_loss)

    @override
    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        if self._accumulation_sync == "every":
            yield
            return
        self._is_held = self._has_held = True
        try:
            with super().block_backward_sync():
                yield
        finally:
            self._is_held = False

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        self._has_held = self._has_held and self._is_held

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        def closure_then_reduce() -> Any:
            result = closure()
            self._reduce_held()  # manual optimization may step without a backward in which DDP would reduce
            return result

        return super().optimizer_step(optimizer, closure_then_reduce, model, **kwargs)

    def _reduce_held(self) -> None:
        if self._has_held:
            assert self.lightning_module is not None
            assert dist.group.WORLD is not None
            self._has_held = False
            reduce_gradients(list(self.lightning_module.parameters()), dist.group.WORLD)

    @override
    def on_exception(self, exception: BaseException) -> None:
        if _UNUSED in str(exception):
            exception.add_note(
                "A step left parameters unused. Let DDP look for them: "
                "--strategy=ddp_custom:find_unused_parameters=true or DDPStrategy(find_unused_parameters=True)."
            )

    @override
    def teardown(self) -> None:
        module = self.lightning_module
        for offloaded in self._offloaded:
            offloaded.detach()
        self._offloaded = []
        if module is not None and isinstance(self.model, DistributedDataParallel):
            self.model = module
            self._reduced = set()
            if not self._own_forward:  # Lightning leaves a bound method there, which copies of the module share
                vars(module).pop("forward", None)
        if self._layers_before is not None:
            self._layers_before.restore(whole)
            self._layers_before = None
        if module is not None and self._layer_sync is not None:
            self.model = self._layer_sync.revert(module)
        super().teardown()


def _trainable(module: nn.Module) -> set[nn.Parameter]:
    return {parameter for parameter in module.parameters() if parameter.requires_grad}

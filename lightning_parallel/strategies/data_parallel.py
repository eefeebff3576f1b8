"""`dp_custom`: one process over all devices of the machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from typing_extensions import override

from lightning_parallel import _lightning
from lightning_parallel.checkpoint.full_state import whole
from lightning_parallel.errors import check
from lightning_parallel.module.snapshot import Snapshot
from lightning_parallel.parallelize import transform_layers
from lightning_parallel.policies import LayerPolicies, Policies
from lightning_parallel.ranks.degrees import Degrees
from lightning_parallel.strategies.planned_strategy import PlannedStrategy
from lightning_parallel.strategies.process_group import is_started_externally
from lightning_parallel.strategies.refusals import (
    layer_policy_violations,
    sharded_elsewhere_violations,
)
from lightning_parallel.strategies.saving_strategy import Saving
from lightning_parallel.techniques.data_parallel import ReplicatedSteps
from lightning_parallel.techniques.offload import replicated_offload_violations

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class DataParallelStrategy(PlannedStrategy):
    """`torch.nn.DataParallel`: scatter the batch, replicate the module, gather on the first device, in one process.

    The loader's batch is the global batch, and is split over the devices. The host is one device, however many
    processes ``devices`` would start under another strategy.

    Args:
        layers: Path or paths of the layer stacks, where the search should not decide.
        recompute: Activations that backward computes again: ``"full"``, ``"every:2"``, ``"selective"`` or
            ``"budget:0.5"`` (see :class:`MeshStrategy`).
        compile: ``"layers"`` compiles each layer of the stacks, in place.
        float8: Recipe of the stacks' linear maps, ``"tensorwise"`` or ``"rowwise"``; needs the extra ``float8``.
        offload: ``"optimizer"`` keeps optimizer state in host memory between updates.
        check: When the first step is compared with one process: ``"auto"`` if a copy fits, ``"first_step"``, ``"off"``.
        on_save_error: Where a checkpoint cannot be written, ``"raise"`` ends the run, ``"warn"`` goes on without it.
        stop_status: Exit status of a run that a signal has ended; 143 is the one of SIGTERM.

    Example:
        >>> Trainer(strategy=DataParallelStrategy(), accelerator="gpu", devices=2)
    """

    def __init__(
        self,
        *,
        layers: str | list[str] | None = None,
        recompute: str = "none",
        compile: str = "none",
        float8: str | None = None,
        offload: str = "none",
        check: str = "auto",
        on_save_error: str = "raise",
        stop_status: int = 143,
    ) -> None:
        layer = LayerPolicies(layers=layers, float8=float8, recompute=recompute, compile=compile)
        policies = Policies(layer=layer, shards=False, offload=offload)
        super().__init__(policies, check=check, saving=Saving(on_save_error, stop_status))
        self._layers_before: Snapshot | None = None
        self._replicated: ReplicatedSteps | None = None

    @override
    def _configure_launcher(self) -> None:
        check(self.set_up_violations())
        rank_zero_info("dp_custom copies the module and gathers outputs in each step; ddp_custom is faster")
        if self.root_device.type == "cpu" and len(self.parallel_devices or ()) > 1:
            rank_zero_info("dp_custom: the host is one device, so it runs in one process on the loader's whole batch")

    @override
    def set_up_violations(self) -> list[str]:
        found = super().set_up_violations()
        if self.num_nodes > 1:
            found.append(f"dp_custom is one process, but num_nodes={self.num_nodes}; give num_nodes=1 or ddp_custom")
        if is_started_externally():
            found.append("dp_custom is one process, but several were started (WORLD_SIZE > 1); use ddp_custom")
        if self._policies.layer.compile == "layers" and len(self.replica_devices) > 1:
            found.append(
                f"compile='layers' on {len(self.replica_devices)} devices: nn.DataParallel runs replicas in threads, "
                "which torch.compile does not trace; use ddp_custom, or devices=1"
            )
        found += replicated_offload_violations(self._policies.offload)
        return found + layer_policy_violations(self._policies.layer, self.root_device)

    @override
    def module_violations(self, module: LightningModule, *, is_fitting: bool) -> list[str]:
        found = [*sharded_elsewhere_violations(self, module), *super().module_violations(module, is_fitting=is_fitting)]
        found += self.plan_for(module).violations
        if len(self.replica_devices) > 1 and not module.automatic_optimization:
            found.append(
                "manual optimization runs backward inside the step, which dp_custom runs in a thread for each of "
                f"{len(self.replica_devices)} devices; use ddp_custom, or devices=1"
            )
        return found

    @property
    @override
    def degrees(self) -> Degrees:
        return Degrees(replicate=len(self.replica_devices), shard=1)

    @property
    @override
    def replica_devices(self) -> list[torch.device]:
        devices = self.parallel_devices or [torch.device("cpu")]
        return devices[:1] if devices[0].type == "cpu" else devices

    @property
    @override
    def root_device(self) -> torch.device:
        return self.replica_devices[0]

    @property
    @override
    def global_rank(self) -> int:
        return 0

    @property
    @override
    def local_rank(self) -> int:
        return 0

    @property
    @override
    def world_size(self) -> int:
        return 1

    @property
    def is_distributed(self) -> bool:
        """Whether Lightning should give each rank other samples: there is one rank."""
        return False

    @property
    @override
    def is_global_zero(self) -> bool:
        return True

    @override
    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        plan = self.plan_for(self.module)
        self.precision_plugin.convert_module(self.module)
        self.model_to_device()
        self._layers_before = transform_layers(self.module, plan.structure, plan.policies.layer)
        if len(self.replica_devices) > 1:
            self._replicated = ReplicatedSteps(self.module, [device.index for device in self.replica_devices])
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        if is_fitting:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if is_fitting:
            _lightning.move_optimizers(self.optimizers, self.root_device)
            self.steps.adopt(self.optimizers)
        self.first_step.note()

    @override
    def model_to_device(self) -> None:
        self.module.to(self.root_device)

    def _step(self, method: str, *args: Any, **kwargs: Any) -> Any:
        if self._replicated is None:
            return getattr(self.module, method)(*args, **kwargs)
        return self._replicated(method, *args, **kwargs)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return self.first_step.run(self._training_step, args, kwargs)

    def _training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.train_step_context():
            return self._step("training_step", *args, **kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.val_step_context():
            return self._step("validation_step", *args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.test_step_context():
            return self._step("test_step", *args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.predict_step_context():
            return self._step("predict_step", *args, **kwargs)

    @override
    def barrier(self, name: str | None = None) -> None:
        """Do nothing: there is one process."""

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return obj

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        return tensor

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        return tensor

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return decision

    @override
    def teardown(self) -> None:
        self._replicated = None
        if self._layers_before is not None:
            self._layers_before.restore(whole)
            self._layers_before = None
        super().teardown()

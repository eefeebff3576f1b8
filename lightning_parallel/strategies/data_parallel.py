"""`dp_custom`: one process over all devices of the machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from typing_extensions import override

from lightning_parallel.checkpoint.full_state import whole
from lightning_parallel.compatibility import stack_violations
from lightning_parallel.errors import check
from lightning_parallel.module.layer_stacks import find_layers, layers_violations
from lightning_parallel.module.snapshot import Snapshot
from lightning_parallel.parallelize import transform_layers
from lightning_parallel.policies import LayerPolicies, Policies
from lightning_parallel.strategies.process_group import is_started_externally
from lightning_parallel.strategies.refusals import (
    layer_policy_violations,
    module_violations,
    sharded_elsewhere_violations,
    without_unmovable_module,
)
from lightning_parallel.techniques.data_parallel import ReplicatedSteps
from lightning_parallel.techniques.deferred_init.deferral import Deferral
from lightning_parallel.techniques.offload import OffloadedState, replicated_offload_violations

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class DataParallelStrategy(ParallelStrategy):
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
    ) -> None:
        super().__init__()
        self._layer_policies = LayerPolicies(layers=layers, float8=float8, recompute=recompute, compile=compile)
        self._offload = offload
        self._offloaded: list[OffloadedState] = []
        self._layers_before: Snapshot | None = None
        self.num_nodes = 1
        self._steps: ReplicatedSteps | None = None
        self._deferral = Deferral(to_meta=False, tell=rank_zero_info)

    @override
    def _configure_launcher(self) -> None:
        check(self.set_up_violations())
        rank_zero_info("dp_custom copies the module and gathers outputs in each step; ddp_custom is faster")
        if self.root_device.type == "cpu" and len(self.parallel_devices or ()) > 1:
            rank_zero_info("dp_custom: the host is one device, so it runs in one process on the loader's whole batch")

    def set_up_violations(self) -> list[str]:
        """Why this strategy cannot run on these devices."""
        found = []
        if self.num_nodes > 1:
            found.append(f"dp_custom is one process, but num_nodes={self.num_nodes}; give num_nodes=1 or ddp_custom")
        if is_started_externally():
            found.append("dp_custom is one process, but several were started (WORLD_SIZE > 1); use ddp_custom")
        if self._layer_policies.compile == "layers" and len(self.replica_devices) > 1:
            found.append(
                f"compile='layers' on {len(self.replica_devices)} devices: nn.DataParallel runs replicas in threads, "
                "which torch.compile does not trace; use ddp_custom, or devices=1"
            )
        found += replicated_offload_violations(self._offload)
        return found + layer_policy_violations(self._layer_policies, self.root_device)

    @override
    def connect(self, model: LightningModule) -> None:
        super().connect(model)
        fitting = model._trainer is not None and model.trainer.state.fn == TrainerFn.FITTING
        found = sharded_elsewhere_violations(self, model)
        if not is_overridden("configure_model", model):
            found += module_violations(model, is_fitting=fitting)
            found += layers_violations(model, self._layer_policies.layers)
            found += stack_violations(model, Policies(layer=self._layer_policies))
        if len(self.replica_devices) > 1 and not model.automatic_optimization:
            found.append(
                "manual optimization runs backward inside the step, which dp_custom runs in a thread for each of "
                f"{len(self.replica_devices)} devices; use ddp_custom, or devices=1"
            )
        check(found)

    @property
    def replica_devices(self) -> list[torch.device]:
        """The devices over which a batch is split."""
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
        """Lightning's question whether to give each rank other samples: there is one rank."""
        return False

    @property
    @override
    def is_global_zero(self) -> bool:
        return True

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        assert self.lightning_module is not None
        self._deferral.attach(self.lightning_module)

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        assert self.lightning_module is not None
        self.accelerator.setup(trainer)
        self.precision_plugin.convert_module(self.lightning_module)
        self.model_to_device()
        check(stack_violations(self.lightning_module, Policies(layer=self._layer_policies)))
        structure = find_layers(self.lightning_module, self._layer_policies.layers)
        self._layers_before = transform_layers(self.lightning_module, structure, self._layer_policies)
        if len(self.replica_devices) > 1:
            self._steps = ReplicatedSteps(self.lightning_module, [device.index for device in self.replica_devices])
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        if is_fitting:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if is_fitting:
            _optimizers_to_device(self.optimizers, self.root_device)
            if self._offload == "optimizer":
                self._offloaded = [OffloadedState(optimizer) for optimizer in self.optimizers]

    @override
    def model_to_device(self) -> None:
        assert self.lightning_module is not None
        self.lightning_module.to(self.root_device)

    def _step(self, method: str, *args: Any, **kwargs: Any) -> Any:
        if self._steps is None:
            return getattr(self.lightning_module, method)(*args, **kwargs)
        return self._steps(method, *args, **kwargs)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
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
        """One process waits for nobody."""

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
        self._steps = None
        self._deferral.detach()
        for offloaded in self._offloaded:
            offloaded.detach()
        self._offloaded = []
        if self._layers_before is not None:
            self._layers_before.restore(whole)
            self._layers_before = None
        with without_unmovable_module(self):
            super().teardown()

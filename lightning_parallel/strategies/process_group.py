"""The base of strategies with one process a device: refusals before launch, the process group, collectives."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor
from typing_extensions import override

from lightning_parallel import _lightning
from lightning_parallel.policies import Policies
from lightning_parallel.ranks.collectives import stacked
from lightning_parallel.ranks.uneven_rows import as_many_rows
from lightning_parallel.strategies.fresh_store import fresh_store, is_store_kept
from lightning_parallel.strategies.launchers import RankOptions, build_launcher, start_violations
from lightning_parallel.strategies.refusals import device_violations
from lightning_parallel.strategies.sampling import SampleDealer
from lightning_parallel.strategies.saving_strategy import Saving
from lightning_parallel.strategies.whole_checkpoints import WholeCheckpointsStrategy

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class ProcessGroupStrategy(WholeCheckpointsStrategy):
    """One process a device, started as Lightning starts them or by torchrun, SLURM and the like.

    Args:
        policies: The rules, but for what belongs to a module.
        ranks: How they are started and joined.
        check: Whether the first step is compared with one process.
        saving: How checkpoints are written, and how a run ends.
    """

    def __init__(self, policies: Policies, ranks: RankOptions, *, check: str, saving: Saving) -> None:
        super().__init__(policies, check=check, saving=saving)
        self._process_group_backend, timeout = ranks.backend, ranks.timeout
        self._timeout = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
        self._start_method, self._ranks = ranks.start_method, ranks
        self._dealer: SampleDealer | None = None

    @property
    @override
    def sends_tensors(self) -> bool:
        return self.num_nodes * self.num_processes > 1

    @override
    def set_up_violations(self) -> list[str]:
        num_ranks = self.num_nodes * self.num_processes
        return [
            *super().set_up_violations(),
            *self._ranks.violations,
            *device_violations(
                num_ranks=num_ranks,
                num_nodes=self.num_nodes,
                device_type=self._device_type,
                syncs_batchnorm=self._layer_sync is not None,
                backend=self._process_group_backend,
            ),
            *start_violations(self._start_method, num_ranks=num_ranks, strategy=self),
        ]

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        self.refuse(self.set_up_violations())
        if not self.cluster_environment.creates_processes_externally:
            self._launcher = build_launcher(self, self._start_method)

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def _device_type(self) -> str:
        return self.parallel_devices[0].type if self.parallel_devices else "cpu"

    @property
    def is_distributed(self) -> bool:
        """Whether Lightning should give each rank other samples."""
        return True

    @property
    def data_group(self) -> dist.ProcessGroup:
        """The ranks that read different samples."""
        assert dist.group.WORLD is not None
        return dist.group.WORLD

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.degrees.data, "rank": self.data_rank}

    @property
    @override
    def data_ranks(self) -> tuple[int, int]:
        return self.degrees.data, self.data_rank

    @property
    def data_rank(self) -> int:
        """This rank's place among those that read different samples."""
        return self.global_rank

    @property
    def process_group_backend(self) -> str | None:
        """The backend as given, or as chosen once the device is known."""
        return self._process_group_backend

    def set_world_ranks(self) -> None:
        """Tell the cluster environment, and Lightning's rank-zero functions, which process this is."""
        assert self.cluster_environment is not None
        self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
        self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = fabric_rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    @override
    def setup_environment(self) -> None:
        # Lightning's own strategies set the seed again here. One process does not: what is built later would differ.
        super().setup_environment()
        self.set_world_ranks()
        self._process_group_backend = self.chosen_backend()
        assert self.cluster_environment is not None
        # Ranks that torchrun has started again must not meet those before them.
        ranks = self.global_rank, self.world_size
        begins_anew = is_store_kept() and not dist.is_initialized()
        store = {"store": fresh_store(*ranks, self._timeout)} if begins_anew else {}
        _lightning.init_process_group(
            self.cluster_environment,
            self._process_group_backend,
            **store,
            timeout=self._timeout,
            device_id=self.root_device if self._device_type != "cpu" else None,
        )
        self._failures.start(self)
        self.watch_hangs(self._ranks.hang_seconds)

    def chosen_backend(self) -> str:
        """The backend given, or the one that fits the device."""
        default = _lightning.default_backend(torch.device(self._device_type))
        return self._process_group_backend or default

    @override
    def setup(self, trainer: Trainer) -> None:
        self._dealer = SampleDealer(trainer)
        super().setup(trainer)

    @override
    def deal_out(self, dataloader: object) -> object:
        return dataloader if self._dealer is None else self._dealer.deal_out(dataloader)

    @override
    def model_to_device(self) -> None:
        self.module.to(self.root_device)

    @override
    def barrier(self, name: str | None = None) -> None:
        if dist.is_initialized():
            dist.barrier(device_ids=[self.root_device.index] if dist.get_backend() == "nccl" else None)

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if not dist.is_initialized():
            return obj
        box = [obj]
        dist.broadcast_object_list(box, src)
        return box[0]

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if not isinstance(tensor, Tensor) or not dist.is_initialized():
            return tensor
        is_whole = not (tensor.is_floating_point() or tensor.is_complex())
        if is_whole and str(reduce_op).lower() in ("mean", "avg"):
            # A mean is no whole number: Lightning's truncates the batch sizes by which it weights logged means.
            tensor = tensor.to(torch.get_default_dtype())
        return _lightning.reduced(tensor, group or self.data_group, reduce_op)

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        # LightningModule.all_gather passes the group of all ranks by default. Ranks that share samples count once.
        is_own = group not in (None, dist.group.WORLD)
        if not is_own and self.may_be_uneven:
            tensor = as_many_rows(tensor, self.data_group, self.root_device)
        if is_own or not dist.is_initialized() or self.data_group is dist.group.WORLD:
            return super().all_gather(tensor, group, sync_grads)
        # torch's gather has a backward only for all ranks of the process.
        with torch.set_grad_enabled(torch.is_grad_enabled() and sync_grads):
            return stacked(tensor, self.data_group)

    @property
    def may_be_uneven(self) -> bool:
        """Whether ranks may have different numbers of samples to gather."""
        return False

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        count = int(self.reduce(torch.tensor(int(decision), device=self.root_device), dist.group.WORLD, "sum"))
        return count == self.world_size if all else count > 0

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        is_exact = self._position.is_exact
        self._streams.begin(self.module.trainer, self.data_rank, self.root_device, reads_on=is_exact)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self.surface()
        self._streams.continue_epoch(self.module.trainer, self.root_device)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._streams.step(self.root_device):
            return super().training_step(*args, **kwargs)

    @override
    def teardown(self) -> None:
        self._streams.end()
        if self._dealer is not None:
            self._dealer.detach()
        super().teardown()


def is_started_externally() -> bool:
    """Whether something like torchrun started several processes."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1

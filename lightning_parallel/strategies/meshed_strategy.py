"""Strategies whose ranks form a mesh, with an axis for each degree."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from typing_extensions import override

from lightning_parallel import _lightning
from lightning_parallel.policies import Policies
from lightning_parallel.ranks.degrees import Degrees
from lightning_parallel.ranks.mesh import Mesh, build_mesh, data_rank_of
from lightning_parallel.strategies.joint_updates import UNDER_PIPELINE
from lightning_parallel.strategies.launchers import RankOptions
from lightning_parallel.strategies.lock_step_strategy import LockStepStrategy
from lightning_parallel.strategies.saving_strategy import Saving


class MeshedStrategy(LockStepStrategy):
    """Resolves the degrees once the devices are known, and builds their mesh once there is a process group.

    Args:
        policies: The rules, but for what belongs to a module.
        degrees: As given.
        ranks: How they are started and joined.
        check: Whether the first step is compared with one process.
        saving: How checkpoints are written, and how a run ends.
    """

    def __init__(self, policies: Policies, degrees: Degrees, ranks: RankOptions, *, check: str, saving: Saving) -> None:
        super().__init__(policies, ranks, check=check, saving=saving)
        self._degrees = degrees
        self._mesh: Mesh | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Process groups belong to this process; a copy joins groups of its own.
        return {**super().__getstate__(), "_mesh": None}

    @property
    @override
    def degrees(self) -> Degrees:
        return self._degrees.resolve(self.num_nodes * self.num_processes, self.num_processes)

    @property
    @override
    def can_leave_out_layers(self) -> bool:
        return self.degrees.pipeline == 1  # whose stages have different ones

    @property
    @override
    def joint_refusal(self) -> str:  # type: ignore[override]
        return UNDER_PIPELINE if self.cuts_stack else ""

    @property
    def mesh(self) -> Mesh:
        """The ranks by purpose; exists once `fit`, `validate`, `test` or `predict` has begun."""
        if self._mesh is None:
            raise RuntimeError("the mesh exists only once fit, validate, test or predict has begun; read it in a hook")
        return self._mesh

    @property
    @override
    def data_group(self) -> dist.ProcessGroup:
        return self._built_mesh().data.get_group()

    @property
    @override
    def data_rank(self) -> int:
        return data_rank_of(self.global_rank, self.degrees, innermost=self._innermost)

    @property
    def _innermost(self) -> str:
        return "pipeline" if self._degrees.pipeline == "node" else "tensor"

    def _built_mesh(self) -> Mesh:
        """The mesh, built by the first collective that needs it. A collective then."""
        if self._mesh is None:
            device_type = self.root_device.type
            self._mesh = build_mesh(self.degrees, device_type, innermost=self._innermost, timeout=self._timeout)
        return self._mesh

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        _lightning.set_device_mesh(self.module, self._built_mesh().devices)

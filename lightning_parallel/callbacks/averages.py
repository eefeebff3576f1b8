"""Averages of parameters, in the form of these: a rank has its shards, and those of its stages."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from lightning_parallel.checkpoint.full_state import whole
from lightning_parallel.checkpoint.stored_tensors import StoredTensors
from lightning_parallel.module.placeholders import is_placeholder
from lightning_parallel.ranks.dtensors import local_of
from lightning_parallel.ranks.stage_owners import StageOwners, stage_owners_of


class Averages:
    """Values by the names of parameters: objects change when a strategy shards the module, or cuts it.

    Where other stages of a pipeline hold a parameter, its average is a tensor on the meta device: all ranks have all
    names in the same order, so that they gather alike.

    Args:
        is_wide: Whether averages of 16-bit parameters are in 32 bits.

    Example:
        >>> averages = Averages()
        >>> averages.begin("weight", parameter)
        >>> averages.update(parameters, decay=0.9)
        >>> averages.whole("weight")
    """

    def __init__(self, *, is_wide: bool = True) -> None:
        self._is_wide = is_wide
        self.tensors: dict[str, Tensor] = {}
        self._owners: dict[str, StageOwners | None] = {}
        self._stored: StoredTensors | None = None
        self._is_placed = True

    @property
    def is_here(self) -> bool:
        """Whether values are in memory, and not in files from which `place` reads them."""
        return self._stored is None

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take whole tensors in the place of what there is, or those of files, of which each rank reads its parts."""
        self._stored, self._is_placed = tensors if isinstance(tensors, StoredTensors) else None, False
        self.tensors, self._owners = tensors.described() if isinstance(tensors, StoredTensors) else dict(tensors), {}

    def begin(self, name: str, parameter: Tensor) -> None:
        """Begin an average with the value of `parameter`."""
        dtype = self._dtype_for(parameter)
        self._owners[name] = stage_owners_of(parameter)
        if is_placeholder(parameter):
            self.tensors[name] = torch.empty(parameter.shape, dtype=dtype, device="meta")
        else:
            self.tensors[name] = parameter.detach().to(dtype, copy=True)

    def update(self, parameters: Mapping[str, Tensor], *, decay: float) -> None:
        """Move averages towards the parameters. A collective where a parameter has moved to another stage.

        Args:
            parameters: Those that the module has now; where one has no average, its own begins if it is trainable.
            decay: The share of the average that stays.
        """
        self.follow(parameters)
        averages, values = list[Tensor](), list[Tensor]()
        for name, parameter in parameters.items():
            average = self.tensors.get(name)
            if average is None and parameter.requires_grad:
                self.begin(name, parameter)
            elif average is None or average.is_meta:
                continue
            elif average.dtype == parameter.dtype:
                averages.append(local_of(average))
                values.append(local_of(parameter))
            else:  # one by one: only one tensor is widened at a time
                local_of(average).lerp_(local_of(parameter).to(average.dtype), 1 - decay)
        if averages:
            get_ema_multi_avg_fn(decay)(averages, values, 0)

    def place(self, parameters: Mapping[str, Tensor], leave_out: Collection[str] = ()) -> None:
        """Bring all averages into the form of the parameters. A collective where they are sharded, or cut, otherwise.

        Args:
            parameters: Those that the module has now.
            leave_out: Names of averages that are dropped.
        """
        kept = {name: parameters[name] for name in self.tensors if name not in leave_out}
        owners = {name: stage_owners_of(parameter) for name, parameter in kept.items()}
        self._is_placed = True
        if self._stored is not None:
            self.tensors |= _read(self._stored, kept)
            self._stored, self._owners = None, owners
        self.tensors = {name: self._in_form_of(name, parameter) for name, parameter in kept.items()}
        self._owners = owners

    def follow(self, parameters: Mapping[str, Tensor]) -> bool:
        """Do so after `load`, and where a parameter has moved to another stage, as a first step may show.

        Args:
            parameters: Those that the module has now.

        Returns:
            Whether any has moved; alike on all ranks.
        """
        has_moved = not self._is_placed or any(
            _ranks(self._owners.get(name)) != _ranks(stage_owners_of(parameters[name])) for name in self.tensors
        )
        if has_moved:
            self.place(parameters)
        return has_moved

    def write(self, parts: Mapping[str, Tensor]) -> None:
        """Write the values into this rank's parts of parameters (`parts_of`)."""
        for name, part in parts.items():
            part.copy_(local_of(self.tensors[name]))

    def parts_of(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's parts of the parameters that have an average here, by name."""
        return {n: local_of(parameters[n]).detach() for n, each in self.tensors.items() if not each.is_meta}

    def whole(self, name: str) -> Tensor:
        """The whole average of a parameter, in host memory. A collective."""
        if self._stored is not None:
            return self._stored[name]  # type: ignore[no-any-return]
        return whole(self.tensors[name], self._owners.get(name))

    def to_host(self) -> None:
        """Move what is on a device to host memory; shards stay shards."""
        self.tensors = {name: each if each.is_meta else each.cpu() for name, each in self.tensors.items()}

    def _in_form_of(self, name: str, parameter: Tensor) -> Tensor:
        average = self.tensors[name]
        has_moved = _ranks(self._owners.get(name)) != _ranks(stage_owners_of(parameter))
        if has_moved:  # alike on all ranks
            average = self.whole(name)
        dtype = self._dtype_for(parameter)
        if is_placeholder(parameter):
            return torch.empty(parameter.shape, dtype=dtype, device="meta")
        if has_moved or _layout(average) != _layout(parameter):
            average = average if has_moved else whole(average)
            if isinstance(parameter, DTensor):
                # Without a source rank each rank cuts its own shard out; the copy lets go of the whole tensor.
                on_device = average.to(parameter.device_mesh.device_type)
                mesh, placements = parameter.device_mesh, parameter.placements
                average = distribute_tensor(on_device, mesh, placements, src_data_rank=None).clone()
            else:
                average = average.clone()
        return average.to(parameter.device, dtype)

    def _dtype_for(self, parameter: Tensor) -> torch.dtype:
        return torch.float32 if self._is_wide and parameter.dtype.itemsize < 4 else parameter.dtype


def _read(stored: StoredTensors, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The stored averages of parameters, in their form; none where a rank has nothing of one."""
    reads: dict[str, Tensor] = {}
    parts = {
        name: stored.part_like(name, parameter, reads)
        for name, parameter in parameters.items()
        if not is_placeholder(parameter)
    }
    stored.folder.read(reads)
    return parts


def _ranks(owners: StageOwners | None) -> Any:
    """The ranks of the pipeline, and those of its stages that hold a parameter."""
    return None if owners is None else (dist.get_process_group_ranks(owners.host_group), owners.ranks)


def _layout(tensor: Tensor) -> Any:
    return (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None

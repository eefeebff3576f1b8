"""Values of shards that user code reads on the host: made whole where all ranks read them, else refused in words."""

from __future__ import annotations

import time
import zlib
from collections import Counter
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from lightning_parallel import _torch
from lightning_parallel.errors import ConfigurationError, asking, line_of_user
from lightning_parallel.ranks.dtensors import whole_on_host
from lightning_parallel.ranks.step_reads import is_in_step, is_updating

INSTEAD = (
    "called on all ranks, full_state_dict(trainer) gives rank 0 the whole weights, trainer.save_checkpoint(path) saves "
    "them, and self.log logs the whole value; the callback GradientNorm logs the norm of all gradients"
)
DEADLINE = 60.0
"""Seconds for which a rank that reads a shard waits for the others to read it. Ranks arrive within milliseconds of
each other, unless one of them loads data or writes a file meanwhile."""
_NAPS = 1e-4, 1e-3
"""Seconds between two looks for the other ranks: the first and the longest."""


class HostReads:
    """Makes whole what is read of a DTensor, after all ranks that have a part of it have said that they read it.

    A collective that only some ranks reach would wait for the others for as long as the process group allows, or meet
    another collective of theirs. So each rank first says in the store of the process group which read it comes to, and
    from which line; the collective follows when all have said the same.

    Args:
        mark: Text that is equal on all ranks, and another one in each fit: after an error, ranks may have come to
            different reads.
        deadline: Seconds to wait for the other ranks; by default `DEADLINE`.
    """

    def __init__(self, mark: str, deadline: float | None = None) -> None:
        self._mark = mark
        self._deadline = DEADLINE if deadline is None else deadline
        # Not asked for again: inside of a step, or for writers of predictions, the default group may be another one.
        self._store = _torch.host_reads.default_store() if dist.is_initialized() else None
        self._counts: Counter[tuple[int, ...]] = Counter()
        self._passed: dict[tuple[int, ...], str] = {}

    def whole(self, tensor: DTensor, read: str) -> Tensor:
        """The whole value of `tensor` in host memory. A collective, where this rank has a part only.

        Args:
            tensor: A parameter, a gradient, or what was computed from them.
            read: What is done with it, for the message.

        Raises:
            ConfigurationError: If other ranks do not read it, too, or cannot any more.
        """
        if _torch.host_reads.is_whole(tensor):
            return tensor.to_local().detach().cpu()
        form = f"{tuple(tensor.shape)} {tensor.dtype}"
        self._meet_sharing(tensor.device_mesh, tensor.placements, form, read)
        return whole_on_host(tensor)

    def meet(self, mesh: DeviceMesh, placements: Sequence[Placement], form: str) -> None:
        """Wait until all ranks have come to an operation in which they wait for each other.

        Args:
            mesh: The mesh of a tensor of which each rank has a part.
            placements: The parts.
            form: Its shape and dtype.

        Raises:
            ConfigurationError: If other ranks do not come, or cannot any more.
        """
        self._meet_sharing(mesh, placements, form, "an operation")

    def gather(self, read: str, own: Any, group: ProcessGroup) -> list[Any]:
        """Gather the value of each rank of a group. A collective, once all of them have come to it.

        Args:
            read: What it is for, for the message.
            own: This rank's value.
            group: The ranks, for host memory.

        Raises:
            ConfigurationError: If other ranks do not come, or cannot any more.
        """
        self._meet(tuple(dist.get_process_group_ranks(group)), read, read)
        found = [own] * group.size()
        dist.all_gather_object(found, own, group=group)
        return found

    @staticmethod
    def is_asked() -> bool:
        """Whether a hook or a script runs an operation on DTensors just now, and no step."""
        names = (_torch.part_operations.__name__, _torch.whole_operands.__name__, _torch.host_reads.__name__)
        return asking(__name__, *names) != ""

    @staticmethod
    def draws_whole() -> bool:
        """Whether a hook, a script or an optimizer of the user's computes with DTensors just now, and no step."""
        return is_updating() or HostReads.is_asked()

    @staticmethod
    def user_code_runs() -> bool:
        """Whether a step, a hook or a script runs an operation on DTensors just now."""
        return is_in_step() or HostReads.is_asked()

    def _meet_sharing(self, mesh: DeviceMesh, placements: Sequence[Placement], form: str, read: str) -> None:
        if mesh.device_type != "cpu":
            # What the device still computes may wait for other ranks; when it is done, they are near this line.
            torch.accelerator.synchronize()
        self._meet(_torch.host_reads.sharing_ranks(mesh, placements), f"{form} {placements}", read)

    def _meet(self, ranks: tuple[int, ...], form: str, read: str) -> None:
        if not dist.is_initialized() or self._store is None:
            raise ConfigurationError([_parted(read, at(line_of_user()))])
        line = line_of_user()
        self._counts[ranks] += 1
        # Files may lie in other folders on another machine.
        what = f"{form} {line.rpartition('/')[2]}"
        group = f"{self._mark}/{zlib.crc32(repr(ranks).encode())}"
        name = f"{group}/{self._counts[ranks]}/{zlib.crc32(what.encode())}"
        store = self._store
        if store.add(f"{name}/ranks", 1) == len(ranks):
            store.set(f"{name}/all", "1")
            if ranks in self._passed:  # nobody waits there any more
                store.delete_key(f"{self._passed[ranks]}/ranks")
                store.delete_key(f"{self._passed[ranks]}/all")
        else:
            end, nap = time.monotonic() + self._deadline, _NAPS[0]
            while not store.check([f"{name}/all"]):
                if time.monotonic() > end:
                    arrived = store.add(f"{name}/ranks", 0)
                    raise ConfigurationError([_alone(read, line, arrived, len(ranks), self._deadline)])
                time.sleep(nap)
                nap = min(2 * nap, _NAPS[1])
        self._passed[ranks] = name

    def refuse(self, call: str) -> NoReturn:
        """Refuse a copy of something that is sharded, or a hook on it.

        Args:
            call: What was called, such as ``"copy.deepcopy"``.
        """
        raise ConfigurationError([(_hooked if call.startswith("register") else _copied)(call, at(line_of_user()))])


def _copied(call: str, place: str) -> str:
    return (
        f"{call} {place} would copy this rank's part of a tensor that is sharded or split over ranks, and pass it off "
        "for the whole. Make copies of modules in __init__, before they are sharded; to go back to values later, copy "
        "module.state_dict(), of which each rank keeps its part; the callback ExponentialMovingAverage averages "
        f"weights; {INSTEAD}"
    )


def _hooked(call: str, place: str) -> str:
    return (
        f"{call} {place} hooks a parameter that is sharded or split over ranks: its gradient is computed as a whole "
        "elsewhere, and the hook would not be called, or with a part. Read p.grad in on_after_backward, hook modules "
        "(register_full_backward_hook), or use ddp_custom or zero1_custom"
    )


def at(line: str) -> str:
    """Say in a message where the user's code stands, if that is known."""
    return f"at {line}" if line else "in this run"


def _parted(read: str, place: str) -> str:
    return (
        f"{read} {place} reads a tensor of which this rank has a part, and the ranks have parted since. Read it while "
        f"the run lasts, such as kept = p.grad.norm().item() in a hook, on all ranks; {INSTEAD}"
    )


def _alone(read: str, line: str, arrived: int, needed: int, deadline: float) -> str:
    return (
        f"{read} {at(line)} reads a tensor of which each of {needed} ranks has a part, but only {arrived} of them came "
        f"to this line within {deadline:.0f} s. Read it on all ranks, outside of conditions such as `if "
        f"self.global_rank == 0` and of what a logger does on rank 0 only; {INSTEAD}"
    )

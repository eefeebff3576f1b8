"""Process groups and device meshes: private or version-dependent names of torch."""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_parallel._torch.dense_parts import dense_parts, travelling

_connections: WeakKeyDictionary[dist.Store, dist.Store] = WeakKeyDictionary()


def flattened(mesh: DeviceMesh, name: str, *, backend: str | None = None) -> DeviceMesh:
    """Flatten all axes of `mesh` into one.

    `DeviceMesh._flatten`, since 2.4; waits for a public spelling.

    Args:
        mesh: Any mesh.
        name: The name of the new axis.
        backend: The backend of a new group; without it, torch may reuse a group of the same ranks.

    Returns:
        A mesh of the single axis `name`.
    """
    return mesh._flatten(name, backend)


def concatenated(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """Build a mesh from the axes of several meshes over the same ranks, some of which may be flattened.

    `DeviceMesh._concatenate`, since 2.10; waits for a public spelling.
    """
    return DeviceMesh._concatenate(list(meshes))


@functools.cache
def leave_to_parents() -> None:
    """From now on, a process that is forked from this one destroys no process group or store that it has inherited.

    Their destructors wait for threads, which a fork does not copy: a worker of a loader that collects garbage, in which
    there is a group of an earlier run, waits for ever, and training for its batch. What has been frozen is not
    collected (`gc.freeze`, made for forks). Seen in 2.13; waits for a destructor that knows in which process it is.
    """
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=gc.freeze)


@contextlib.contextmanager
def gloo_of_one_thread() -> Iterator[None]:
    """Inside this context, and inside of others in it, new gloo groups have one thread each: torch gives them two.

    Both threads write the name of the collective that they have finished into one string of the group, without a lock.
    Names of more than 15 characters, such as that of the gathers of DTensors, are on the heap, and two simultaneous
    writes corrupt it: the process crashes some time later, in unrelated code. Seen in 2.11, 2.13 and 2.14;
    `tests/stress_gloo.py` shows it.

    Not for the default process group, in which DDP runs: the names of its collectives are short, and PowerSGD waits
    for one collective in the thread that has finished another, which would deadlock with a single thread.
    `ProcessGroupGloo._Options`, in all supported versions; waits for a lock in torch, or for `pg_options` of gloo.
    """
    if not dist.is_gloo_available() or hasattr(dist.distributed_c10d.ProcessGroupGloo, "_has_one_thread"):
        yield
        return
    of_torch: Any = dist.distributed_c10d.ProcessGroupGloo

    class OfOneThread(of_torch):  # type: ignore[misc]
        _has_one_thread = True

        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, **settings: Any) -> None:
            options = of_torch._Options()
            options._timeout, options._threads = timeout, 1
            for name, value in settings.items():  # `enable_reconfigure`, since 2.14
                setattr(options, name, value)
            interfaces = os.environ.get("GLOO_SOCKET_IFNAME")
            options._devices = (
                [of_torch.create_device(interface=each) for each in interfaces.split(",")]
                if interfaces
                else [of_torch.create_default_device()]
            )
            super().__init__(store, rank, size, options)

    dist.distributed_c10d.ProcessGroupGloo = OfOneThread  # type: ignore[misc]
    try:
        yield
    finally:
        dist.distributed_c10d.ProcessGroupGloo = of_torch  # type: ignore[misc]


@contextlib.contextmanager
def all_ranks_are(group: dist.ProcessGroup) -> Iterator[None]:
    """Inside this context, collectives that are given no group run over `group`, as if there were no other ranks.

    `distributed_c10d._update_default_pg`, since 2.2; waits for a default group that can be set.

    Args:
        group: Ranks that include this one, and rank 0 where something comes from there.
    """
    own = dist.group.WORLD
    dist.distributed_c10d._update_default_pg(group)
    try:
        yield
    finally:
        dist.distributed_c10d._update_default_pg(own)


@contextlib.contextmanager
def collectives_checked(check: Callable[[str, dist.ProcessGroup | None, object], None]) -> Iterator[None]:
    """Inside this context, `check` is called with name, group and operation of each collective before it begins.

    All functions of `torch.distributed` that communicate ask `distributed_c10d._rank_not_in_group` first, in all
    supported versions, and so do those that get or set a property of a group; there is no public hook.

    Args:
        check: Is given ``None`` for the default group, and where the collective reduces nothing.
    """
    own = dist.distributed_c10d._rank_not_in_group

    def checked(group: Any) -> bool:
        frame = inspect.currentframe()
        asks = frame and frame.f_back
        while frame and asks and asks.f_code is frame.f_code:  # of a context around this one
            asks = asks.f_back
        name = asks.f_code.co_name if asks else "a collective"
        if group is not dist.GroupMember.NON_GROUP_MEMBER and not name.startswith(("get_", "set_", "_set_")):
            check(name, group, asks and asks.f_locals.get("op"))
        return own(group)

    dist.distributed_c10d._rank_not_in_group = checked
    try:
        yield
    finally:
        dist.distributed_c10d._rank_not_in_group = own


def connected_store() -> Any:
    """A second connection to the store in which the ranks of the default process group have met.

    The group's own is taken while a thread waits in it, so nobody may wait in this one. A process has one of them: the
    store looks up the name of each that connects, and stands still for seconds where a name server does not answer.
    `distributed_c10d._get_default_store`, since 1.12; waits for a public name.
    """
    store = dist.distributed_c10d._get_default_store()  # type: ignore[attr-defined]
    if store not in _connections:
        _connections[store] = store.clone()  # type: ignore[attr-defined]
    return _connections[store]


def set_timeout(group: Any, timeout: timedelta) -> None:
    """Set how long collectives of `group` wait for a missing rank: groups of a mesh cannot be made with a timeout.

    `torch.distributed.set_timeout` (public) since 2.15, where `distributed_c10d._set_pg_timeout`, since 2.2, warns;
    waits for a `timeout` of `init_device_mesh`.

    Args:
        group: The process group.
        timeout: The longest wait.
    """
    set_of_torch = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    set_of_torch(timeout, group)


def broadcast_tensors(tensors: Sequence[Tensor], *, source: int, group: Any = None, bucket_bytes: int = 2**26) -> None:
    """Broadcast many tensors in place, one collective for each bucket.

    `torch.distributed._broadcast_coalesced`, since 1.0; DDP uses it itself, there is no public spelling.

    Args:
        tensors: Of the same shapes and dtypes, in the same order, on every rank; of any layout and class.
        source: The rank in `group` whose values all get.
        group: The ranks that take part, by default all.
        bucket_bytes: The size of a bucket, in bytes.
    """
    if tensors:
        group = group or dist.distributed_c10d._get_default_group()
        sent = [travelling(part) for part in dense_parts(tensors)]
        if any(tensor.layout is not torch.strided for tensor in tensors):
            _check_sizes(sent, group)
        dist._broadcast_coalesced(group, sent, bucket_bytes, source)  # type: ignore[attr-defined]


def _check_sizes(parts: Sequence[Tensor], group: Any) -> None:
    """Refuse to send sparse tensors that have other numbers of values on some ranks. A collective."""
    sizes = torch.tensor([[part.numel(), -part.numel()] for part in parts], device=parts[0].device)
    dist.all_reduce(sizes, op=dist.ReduceOp.MAX, group=group)
    most, least = sizes.mul(torch.tensor([1, -1], device=sizes.device)).sum(0).tolist()
    if most != least:
        raise RuntimeError(_OTHER_SIZES.format(least, most))


_OTHER_SIZES = (
    "ranks have other numbers of values in sparse buffers than others, with their indices {} and {}, and cannot send "
    "them to each other before each step: give them as many on all ranks, or keep them dense"
)


def reduce_scatter(part: Tensor, whole: Tensor, group: Any) -> None:
    """Sum `whole` over the ranks, and write this rank's part of the sum into `part`. A collective.

    `torch.distributed.reduce_scatter_single`, since 2.13, where `reduce_scatter_tensor` warns.

    Args:
        part: `[size / ranks, ...]`, written in place.
        whole: `[size, ...]`.
        group: The ranks.
    """
    collective = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    collective(part, whole, group=group)


def is_collective_of(group: dist.ProcessGroup, func: Any, args: Sequence[Any]) -> bool:
    """Whether an operation of a `TorchDispatchMode` is a collective over `group`, in which ranks wait for each other.

    Operators of the namespaces `c10d`, with the group as an object, and `_c10d_functional`, with its name; since 2.0.

    Args:
        group: The ranks.
        func: The operator.
        args: Its arguments by position.
    """
    namespace = getattr(func, "namespace", "")
    if namespace == "c10d":
        objects = [arg for arg in args if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type())]
        return any(dist.ProcessGroup.unbox(each).group_name == group.group_name for each in objects)
    return namespace == "_c10d_functional" and group.group_name in args and "wait" not in func.overloadpacket.__name__

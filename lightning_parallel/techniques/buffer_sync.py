"""Buffers as under DDP: every rank gets those of rank 0 before each step, but for large ones that nobody writes.

Masks and tables of positions are buffers, too, as large as layers. Torch counts what is written into a tensor, but for
writes through ``.data``. Those are looked for in the first steps, and then ever more rarely.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from lightning_parallel import _torch
from lightning_parallel.module.placeholders import is_placeholder

_FIRST = 3
"""Calls in which contents are compared one after the other; afterwards in those whose number is a power of two."""
_LEAST_BYTES = 2**20
"""To broadcast less takes no longer than to agree on leaving it out."""


class BufferSync:
    """Gives every rank the buffers of rank 0, or of the first rank of a group, so that BatchNorm statistics stay equal.

    Args:
        module: The module, whose buffers are equal on all ranks now.
        group: The ranks that compute the same buffers, by default all; all get those of its first rank.
        host_group: These ranks, and maybe others that have the same buffers, for host memory.
        tell: Takes a sentence for the user.

    Example:
        >>> buffers = BufferSync(module, None, mesh.stage_host_group, tell=print)
        >>> buffers.synchronize()
    """

    def __init__(
        self, module: nn.Module, group: ProcessGroup | None, host_group: ProcessGroup, *, tell: Callable[[str], None]
    ) -> None:
        self._module, self._group, self._host_group, self._tell = module, group, host_group, tell
        self._calls = 0
        self._written: set[str] = set()
        self._marks: dict[str, tuple[Tensor, int]] = {}
        self._copies: dict[str, list[Tensor]] = {}

    @torch.no_grad()
    def synchronize(self) -> None:
        """Broadcast what may have been written since the last call. A collective."""
        buffers = {name: buffer for name, buffer in self._module.named_buffers() if _is_here(buffer)}
        if not buffers or not (dist.is_initialized() and dist.get_world_size() > 1):
            return
        quiet = {name: buffer for name, buffer in buffers.items() if name not in self._written}
        if sum(buffer.numel() * buffer.itemsize for buffer in quiet.values()) < _LEAST_BYTES:
            self._broadcast(buffers)
            return
        self._calls += 1
        looks = self._calls <= _FIRST or self._calls & (self._calls - 1) == 0
        self._agree(quiet, looks=looks)
        # With each look all of them, so that what is written unseen does not stay different on the ranks.
        sent = buffers if looks else {name: buffers[name] for name in buffers if name in self._written}
        self._broadcast(sent)
        quiet = {name: buffer for name, buffer in quiet.items() if name not in self._written}
        self._marks = {name: (buffer, _version(buffer)) for name, buffer in quiet.items()}
        if looks:
            self._copies = {name: [each.to("cpu", copy=True) for each in _parts(b)] for name, b in quiet.items()}

    def _agree(self, quiet: Mapping[str, Tensor], *, looks: bool) -> None:
        """Add to what is written what any rank has seen so; a collective, in host memory."""
        counted = [self._is_counted(name, buffer) for name, buffer in quiet.items()]
        unseen = [
            looks and not is_counted and self._differs(*n) for is_counted, n in zip(counted, quiet.items(), strict=True)
        ]
        flags = torch.tensor([counted, unseen], dtype=torch.uint8)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._host_group)
        is_counted, is_unseen = flags.bool().tolist()
        late = [name for name, is_late in zip(quiet, is_unseen, strict=True) if is_late and self._calls > _FIRST]
        if late:
            self._tell(
                f"the buffers {', '.join(late)} are written through .data, which torch does not count, and not in the "
                "first steps: until now, each rank had its own values since then. Write them without .data, under "
                "torch.no_grad()"
            )
        self._written.update(n for n, a, b in zip(quiet, is_counted, is_unseen, strict=True) if a or b)

    def _is_counted(self, name: str, buffer: Tensor) -> bool:
        """Whether torch has counted a write since the last call, or there is another buffer of this name."""
        if not self._marks:
            return False  # the first call: all ranks begin with the same buffers
        before = self._marks.get(name)
        return before is None or before[0] is not buffer or before[1] < 0 or _version(buffer) != before[1]

    def _differs(self, name: str, buffer: Tensor) -> bool:
        copies, parts = self._copies.get(name), _parts(buffer)
        if copies is None:
            return False
        return len(copies) != len(parts) or any(not _is_same(a, b.cpu()) for a, b in zip(copies, parts, strict=True))

    def _broadcast(self, buffers: Mapping[str, Tensor]) -> None:
        _torch.groups.broadcast_tensors(list(buffers.values()), source=0, group=self._group)


def _is_here(buffer: Tensor) -> bool:
    """Whether this rank has all of it; of a copy of a parameter that a hook has made a buffer, it may have a part."""
    return not (buffer.is_meta or isinstance(buffer, DTensor) or is_placeholder(buffer))


def _parts(buffer: Tensor) -> list[Tensor]:
    return _torch.dense_parts.dense_parts((buffer.detach(),))


def _version(buffer: Tensor) -> int:
    return -1 if buffer.is_inference() else buffer._version


def _is_same(first: Any, second: Any) -> bool:
    """Whether two tensors are the same, bit by bit as far as NaN goes."""
    return first.shape == second.shape and bool(((first == second) | ((first != first) & (second != second))).all())

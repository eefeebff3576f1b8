"""Sketches of what the modules of two runs return, in the order of their calls: where the runs begin to differ."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_parallel.module.differences import Tolerance, value_difference
from lightning_parallel.module.placeholders import is_placeholder
from lightning_parallel.ranks.dtensors import full_of

_BUCKETS = 16
"""Numbers to which each row is reduced: enough for a distance to come out right within a factor of two."""
_AT_ONCE = 1 << 22
"""Elements that are copied to float64 at a time."""

Sketch = tuple[torch.Size, Tensor]
"""The shape of a row of a tensor, and a few numbers for each row."""
_Call = list[Sketch] | None
"""Returned values of a call; ``None`` where that is nothing to compare."""


@dataclass
class OutputSketches:
    """Sketches of what the submodules of a module return.

    Args:
        module: The module.
        leaves_out: Paths whose modules are not looked into; the modules of these paths themselves are.
    """

    module: nn.Module
    leaves_out: Collection[str] = ()
    calls: dict[str, list[_Call]] = field(default_factory=dict)
    """Path -> what each call has returned, in the order in which modules have first returned."""

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Inside this context, sketches are taken."""
        signs = _Signs()
        with contextlib.ExitStack() as stack:
            for path, child in self.module.named_modules():
                if path and not any(path.startswith(f"{above}.") for above in self.leaves_out):
                    stack.callback(child.register_forward_hook(self._hook(path, signs)).remove)
            yield

    def _hook(self, path: str, signs: _Signs) -> Callable[..., None]:
        def note(module: nn.Module, args: Any, output: Any) -> None:
            self.calls.setdefault(path, []).append(_sketches(output, signs))

        return note

    def verdicts(self, expected: OutputSketches, tolerance: Tolerance) -> dict[str, float | None]:
        """The distances of outputs from those of another run.

        Args:
            expected: The other run.
            tolerance: How far they may be apart.

        Returns:
            Path -> the largest distance of an output, as a share of its norm, 0 within the tolerance, or ``None`` where
            the two cannot be compared; in the order of the other run.
        """
        found = {path: _distance(self.calls.get(path, []), calls) for path, calls in expected.calls.items()}
        return {path: 0.0 if each is not None and each <= tolerance.output else each for path, each in found.items()}


def first_difference(verdicts: Sequence[dict[str, float | None]]) -> str:
    """The first module whose output differs, in words; empty where none is known.

    Args:
        verdicts: Those of all ranks.
    """
    order = next((each for each in verdicts if any(each.values())), None)
    if order is None:
        return ""
    known = {path: [each[path] for each in verdicts if each.get(path) is not None] for path in order}
    before = ""
    unknown: list[str] = []
    for path in order:
        if apart := max((each for each in known[path] if each), default=0.0):
            equal = f", after that of {before!r}, which is equal" if before else ""
            others = f"; {len(unknown)} modules between these were not compared" if unknown else ""
            return f"the output of {path!r} is the first to differ, by about {apart:.1e} of its norm{equal}{others}"
        if known[path]:
            before, unknown = path, []
        else:
            unknown.append(path)
    return ""


class _Signs:
    """Random signs, the same ones for rows of one length."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, torch.device], Tensor] = {}

    def of(self, size: int, device: torch.device) -> Tensor:
        if (size, device) not in self._known:
            drawn = torch.randint(2, (size,), generator=torch.Generator().manual_seed(size))
            self._known[size, device] = (2.0 * drawn.double() - 1.0).to(device)
        return self._known[size, device]


def _sketches(output: Any, signs: _Signs) -> list[Sketch] | None:
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    if not tensors or any(is_placeholder(tensor) or not tensor.numel() for tensor in tensors):
        return None
    return [_sketch(full_of(tensor.detach()), signs) for tensor in tensors]


def _sketch(tensor: Tensor, signs: _Signs) -> Sketch:
    """Each row of `tensor` in a few numbers, linear in it, whose distances are about those of the rows."""
    rows = tensor.reshape(len(tensor), -1) if tensor.ndim else tensor.reshape(1, 1)
    size = rows.shape[1]
    if size <= _BUCKETS:
        return tensor.shape[1:], rows.double().cpu()
    own, missing = signs.of(size, rows.device), -size % _BUCKETS
    parts = [F.pad(part.double() * own, (0, missing)) for part in rows.split(max(1, _AT_ONCE // size))]
    return tensor.shape[1:], torch.cat([part.reshape(len(part), _BUCKETS, -1).sum(-1) for part in parts]).cpu()


def _distance(ours: Sequence[_Call], expected: Sequence[_Call]) -> float | None:
    """The largest distance of what calls of a module have returned; ``None`` if it is another kind of thing."""
    if len(ours) != len(expected) and len(expected) != 1:
        return None
    found = [_distance_of_parts([own], each) for own, each in zip(ours, expected, strict=False)]
    if len(ours) != len(expected):
        found = [_distance_of_parts(ours, expected[0])]
    return None if not found or None in found else max(each for each in found if each is not None)


def _distance_of_parts(parts: Sequence[_Call], expected: _Call) -> float | None:
    """The distance of what a call has returned from microbatches of it, whatever their order is."""
    if expected is None or any(part is None or len(part) != len(expected) for part in parts):
        return None
    found = 0.0
    for index, (shape, rows) in enumerate(expected):
        own = [part[index] for part in parts if part is not None]
        if any(each != shape for each, _ in own) or len(rows) != sum(len(each) for _, each in own):
            return None
        if len({len(each) for _, each in own}) != 1:
            return None
        chunks = rows.split(len(own[0][1]))
        nearest = [_nearest(each, chunks) for _, each in own]
        found = max(found, value_difference(torch.cat([each for _, each in own]), torch.cat(nearest)))
    return found


def _nearest(rows: Tensor, chunks: Sequence[Tensor]) -> Tensor:
    distances = [float((chunk - rows).norm()) for chunk in chunks]
    return chunks[distances.index(min(distances))]

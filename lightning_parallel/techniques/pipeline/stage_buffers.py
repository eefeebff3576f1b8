"""Buffers that a stage of a pipeline writes in a step, on all stages after it: hooks read them as in one process.

Hooks may register them when the stages are there already, and layers may keep plain tensors in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_parallel import _torch
from lightning_parallel.module.placeholders import is_placeholder
from lightning_parallel.techniques.pipeline.cut import CutStack


class StageBuffers:
    """Gives buffers that stages write in a step to the other stages, and tensors in attributes of layers.

    Args:
        module: The module, of which each stage has all buffers.
        cut: The stack, with the stages that hold its layers.
        is_shared: Whether a buffer of that name is to be the same on all stages.

    Example:
        >>> buffers = StageBuffers(module, cut)
        >>> buffers.note()
        >>> ...  # a step
        >>> buffers.share()
    """

    def __init__(
        self,
        module: nn.Module,
        cut: CutStack,
        *,
        is_shared: Callable[[str], bool] = lambda name: True,
    ) -> None:
        self._module, self._cut, self._is_shared = module, cut, is_shared
        self._before: dict[str, tuple[Tensor, int]] = {}
        self._attributes: list[tuple[str, nn.Module, str]] = []
        self._num_steps = 0
        self._is_needed = False

    def note(self) -> None:
        """Note the buffers before a step."""
        if self._is_due:
            self._attributes = list(_attributes(self._module, self._cut.plan.placement.layers))
        self._before = {name: (tensor, _version(tensor)) for name, tensor in self._tensors()}

    @torch.no_grad()
    def share(self) -> None:
        """Give each stage the buffers that others have written since `note`. A collective.

        Of several stages that have written one, the owner's is taken.
        """
        is_due, self._num_steps = self._is_due, self._num_steps + 1
        if not is_due and not self._is_needed:
            return
        written = {name: (t.detach().cpu().clone(), self._is_persistent(name)) for name, t in self._written()}
        # Layers keep tensors on their own stage only, so stages agree on whether there is anything to look at.
        flags = torch.tensor([bool(written), bool(self._before) or bool(written)], dtype=torch.uint8)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._cut.host_group)
        is_any, self._is_needed = map(bool, flags.tolist())
        if not is_any:
            return
        found: list[dict[str, tuple[Tensor, bool | None]]] = [{}] * self._cut.host_group.size()
        dist.all_gather_object(found, written, group=self._cut.host_group)
        for name in dict.fromkeys(name for of_stage in found for name in of_stage):
            writers = [rank for rank, of_stage in enumerate(found) if name in of_stage]
            # Where a buffer is used is a guess from the order of registration: it may be another stage that writes it.
            owners = [rank for rank in self._cut.ranks_of(name) if rank in writers]
            source = (owners or writers[::-1])[0]
            if source != self._cut.host_group.rank():
                self._set(name, *found[source][name])

    @property
    def _is_due(self) -> bool:
        """Whether this step is one of the first, or of a few later ones, in which all is looked for anew."""
        return self._num_steps < 2 or self._num_steps & (self._num_steps - 1) == 0

    def _written(self) -> Iterator[tuple[str, Tensor]]:
        for name, buffer in self._buffers():
            before = self._before.get(name)
            if not is_placeholder(buffer) and (before is None or not _is_unwritten(buffer, *before)):
                yield name, buffer
        # A tensor that replaces another one is that of a microbatch, as a rule: only what is written into counts here.
        for name, tensor in self._plain_tensors():
            before = self._before.get(name)
            if before is not None and tensor is before[0] and not _is_unwritten(tensor, *before):
                yield name, tensor

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._buffers()
        yield from self._plain_tensors()

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        for name, buffer in self._module.named_buffers(remove_duplicate=False):
            if self._is_shared(name):
                yield name, buffer

    def _plain_tensors(self) -> Iterator[tuple[str, Tensor]]:
        for path, module, attribute in self._attributes:
            value = vars(module).get(attribute)
            if isinstance(value, Tensor) and not is_placeholder(value) and not value.requires_grad:
                yield f"{path}.{attribute}", value

    def _place(self, name: str) -> tuple[nn.Module, str]:
        path, _, attribute = name.rpartition(".")
        return self._module.get_submodule(path), attribute

    def _is_persistent(self, name: str) -> bool | None:
        """Whether a buffer belongs to the state dict; nothing for a tensor that is no buffer."""
        module, attribute = self._place(name)
        return attribute not in module._non_persistent_buffers_set if attribute in module._buffers else None

    def _set(self, name: str, value: Tensor, is_persistent: bool | None) -> None:
        module, attribute = self._place(name)
        if is_persistent is not None and attribute not in module._buffers:
            vars(module).pop(attribute, None)  # a plain tensor until this step, for which torch takes no buffer
            module.register_buffer(attribute, None, persistent=is_persistent)
        elif is_persistent is False:  # put there with what else its layer has left, which says nothing of this
            module._non_persistent_buffers_set.add(attribute)
        table: dict[str, Any] = vars(module) if is_persistent is None else module._buffers
        own = table.get(attribute)
        if own is None or is_placeholder(own) or not _is_alike(own, value):
            device = value.device if own is None else own.device
            table[attribute] = value.to(device, copy=True)
        else:
            own.copy_(value)


def _attributes(module: nn.Module, layers: Sequence[str]) -> Iterator[tuple[str, nn.Module, str]]:
    """Tensors that modules in layers have in attributes: path, module and name."""
    for layer in layers:
        for path, child in module.get_submodule(layer).named_modules(prefix=layer):
            for name, value in vars(child).items():
                if isinstance(value, Tensor):
                    yield path, child, name


def _is_alike(own: Tensor, value: Tensor) -> bool:
    """Whether one can be copied into the other."""
    is_dense = all(map(_torch.dense_parts.is_dense, (own, value)))
    return is_dense and own.shape == value.shape and own.dtype == value.dtype


def _version(buffer: Tensor) -> int:
    return -1 if buffer.is_inference() else buffer._version


def _is_unwritten(buffer: Tensor, before: Tensor, version: int) -> bool:
    return buffer is before and version >= 0 and _version(buffer) == version

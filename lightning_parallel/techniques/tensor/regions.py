"""Hidden states on their way into the branches of a split layer, and out of them.

Between branches they are whole on every rank (`ReplicatedRegion`), or each rank has a part of the positions
(`SequenceRegion`; Korthikanti et al. 2022): then norms, dropout and residuals are computed once and not on every rank,
and what one all-reduce moves is moved by an all-gather and a reduce-scatter.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_leaves, tree_map_only
from typing_extensions import override

from lightning_parallel.module.hidden_states import Lengths, sequence_part_stream, take_hidden
from lightning_parallel.ranks.collectives import (
    copy_all_to,
    copy_to,
    gather_from,
    gather_from_sequence,
    reduce_from,
    reduce_scatter_to_sequence,
    scatter_to,
    share_gradient,
)
from lightning_parallel.techniques.tensor.dtensor_gradients import as_summand


class ReplicatedRegion:
    """Hidden states are whole on every rank.

    Args:
        group: The ranks that share a matrix product.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self._column_input: tuple[Tensor, Tensor] | None = None

    @property
    def is_at_entry(self) -> bool:
        """Whether all that a layer is given is whole."""
        return True

    def column_input(self, states: Tensor) -> Tensor:
        """The input of a column-parallel map, `[batch, length, width]`, of hidden states as they are between branches.

        Maps that read the same hidden states share it, and so one all-reduce backward.
        """
        if self._column_input is None or self._column_input[0] is not states:
            self._column_input = (states, copy_to(states, self.group))
        return self._column_input[1]

    def row_output(self, summand: Tensor) -> Tensor:
        """Hidden states as they are between branches, of each rank's output of a row-parallel map."""
        return reduce_from(summand, self.group)

    def row_input(self, whole: Tensor) -> Tensor:
        """This rank's input of a row-parallel map, `[..., width / ranks]`, of one that is whole inside a branch."""
        return scatter_to(whole, -1, self.group)

    def copy_to(self, whole: Tensor) -> Tensor:
        """A tensor that is whole inside a branch, of which each rank goes on with it in its own way."""
        return copy_to(whole, self.group)

    def as_dtensor(self, tensor: Tensor, mesh: DeviceMesh) -> Tensor:
        """A tensor that is whole inside a branch, as a DTensor."""
        return DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)

    def run_layer(self, layer: nn.Module, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """One layer."""
        try:
            return function(*args, **kwargs)
        finally:
            self._column_input = None

    def run_branch(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A submodule in which a branch begins."""
        return function(*args, **kwargs)

    def alone(self) -> ReplicatedRegion:
        """The region of one layer that runs by itself."""
        return self

    def whole_arguments(self, args: Any, kwargs: Any) -> Any:
        """The arguments of a layer with whole hidden states."""
        return args, kwargs


class SequenceRegion(ReplicatedRegion):
    """Each rank has a part of the positions between branches, from the first layer of a stack to the last.

    Gradients of whatever is whole inside of a layer are summands there: what each rank's positions, or heads, add.

    Args:
        group: The ranks that share a matrix product.
        is_first: Whether the layer is the first of its stack.
        is_last: Whether it is the last.
        lengths: What is cut now; layers of one stack share it.
    """

    def __init__(self, group: ProcessGroup, *, is_first: bool, is_last: bool, lengths: Lengths) -> None:
        super().__init__(group)
        self._is_first, self._is_last, self._lengths = is_first, is_last, lengths
        self._shape: torch.Size | None = None
        self._is_inside = False
        self._arguments: list[Tensor] = []

    @property
    @override
    def is_at_entry(self) -> bool:
        return self._is_first

    @override
    def column_input(self, states: Tensor) -> Tensor:
        if self._is_inside or any(states is argument for argument in self._arguments):
            return states
        if states.shape != self._shape:
            raise RuntimeError(
                f"a branch is given {tuple(states.shape)}, not the hidden states {tuple(self._shape or ())} of a part "
                "of the positions"
            )
        if self._column_input is None or self._column_input[0] is not states:
            whole = gather_from_sequence(states, self._lengths.dim, self.group, length=self._length(states))
            self._column_input = (states, whole)
        return self._column_input[1]

    @override
    def row_output(self, summand: Tensor) -> Tensor:
        local = self._lengths.add(summand.shape[self._lengths.dim])
        return reduce_scatter_to_sequence(summand, self._lengths.dim, self.group, local=local)

    @override
    def row_input(self, whole: Tensor) -> Tensor:
        return whole.chunk(self.group.size(), -1)[self.group.rank()]

    @override
    def copy_to(self, whole: Tensor) -> Tensor:
        return whole  # its gradient is a summand already

    @override
    def as_dtensor(self, tensor: Tensor, mesh: DeviceMesh) -> Tensor:
        dim = self._lengths.dim
        if tensor.ndim > dim + 1 and tensor.shape[dim] in self._lengths.whole and self._shape is not None:
            self._refuse_mixing(tensor)
        return as_summand(tensor, mesh)

    def _refuse_mixing(self, tensor: Tensor) -> None:
        raise RuntimeError(
            f"a tensor {tuple(tensor.shape)} of a part of the positions meets one of all positions inside the layer"
        )

    @override
    def run_layer(self, layer: nn.Module, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        hidden, args, kwargs = take_hidden(args, kwargs)
        args, kwargs = tree_map_only(Tensor, self._copied_argument, (args, kwargs))
        self._arguments = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if self._is_first:
            local = self._lengths.add(hidden.shape[self._lengths.dim])
            hidden = scatter_to(hidden, self._lengths.dim, self.group, local=local)
        self._shape = hidden.shape
        is_random = layer.training and torch.is_grad_enabled()
        try:
            with _copied_parameters(layer, self.group), sequence_part_stream(self.group, is_needed=is_random):
                output = function(hidden, *args, **kwargs)
        finally:
            self._column_input = self._shape = None
            self._arguments = []
        first, *others = output if isinstance(output, tuple) else (output,)
        if isinstance(first, DTensor):
            self._refuse_mixing(first)
        if self._is_last:
            first = gather_from(first, self._lengths.dim, self.group, length=self._length(first))
        others = tree_map_only(Tensor, self._shared_result, others)
        return (first, *others) if isinstance(output, tuple) else first

    @override
    def run_branch(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self._is_inside or self._shape is None:
            return function(*args, **kwargs)
        hidden, args, kwargs = take_hidden(args, kwargs)
        hidden = self.column_input(hidden)
        self._is_inside = True
        try:
            return function(hidden, *args, **kwargs)
        finally:
            self._is_inside = False

    @override
    def whole_arguments(self, args: Any, kwargs: Any) -> Any:
        if self._is_first:
            return args, kwargs
        hidden, args, kwargs = take_hidden(args, kwargs)
        dim = self._lengths.dim
        return (gather_from(hidden, dim, self.group, length=self._length(hidden)), *args), kwargs

    @override
    def alone(self) -> SequenceRegion:
        return SequenceRegion(self.group, is_first=True, is_last=True, lengths=self._lengths)

    def _length(self, part: Tensor) -> int:
        return self._lengths.whole[part.shape[self._lengths.dim]]

    def _copied_argument(self, tensor: Tensor) -> Tensor:
        return copy_to(tensor, self.group) if tensor.requires_grad else tensor

    def _shared_result(self, tensor: Tensor) -> Tensor:
        return share_gradient(tensor, self.group) if tensor.requires_grad else tensor


@contextlib.contextmanager
def _copied_parameters(layer: nn.Module, group: ProcessGroup) -> Iterator[None]:
    """Inside this context, gradients of parameters that every rank has whole are added up: one all-reduce a layer."""
    found = [
        (child, name, parameter)
        for child in layer.modules()
        for name, parameter in child._parameters.items()
        if parameter is not None and parameter.requires_grad and not isinstance(parameter, DTensor)
    ]
    copies = copy_all_to([parameter for _, _, parameter in found], group) if torch.is_grad_enabled() else []
    try:
        for (child, name, _), copied in zip(found, copies, strict=False):
            child.__dict__[name] = copied  # found before the parameter of that name
        yield
    finally:
        for child, name, _ in found:
            child.__dict__.pop(name, None)

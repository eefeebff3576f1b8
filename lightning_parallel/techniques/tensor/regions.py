"""Regions between the branches of a split layer, with the collectives by which hidden states enter and leave a branch.

In such a region, hidden states are whole on every rank (`ReplicatedRegion`), or each rank has a part of the positions
(`SequenceRegion`; Korthikanti et al. 2022). Then norms, dropout and residuals are computed once instead of on every
rank, and an all-gather and a reduce-scatter, of the same volume together, replace each all-reduce.
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

from lightning_parallel.module.hidden_states import (
    Lengths,
    hidden_in,
    sequence_part_stream,
    take_hidden,
    with_hidden,
    with_hidden_first,
)
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
    """Region in which hidden states are whole on every rank.

    Args:
        group: The ranks that share a matrix product.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self._column_input: tuple[Tensor, Tensor] | None = None

    @property
    def is_at_entry(self) -> bool:
        """Whether all arguments of the layer are whole."""
        return True

    def column_input(self, states: Tensor) -> Tensor:
        """Make the input of a column-parallel map, `[batch, length, width]`, from hidden states between branches.

        Maps that read the same hidden states share it, and with it one all-reduce in backward.
        """
        if self._column_input is None or self._column_input[0] is not states:
            self._column_input = (states, copy_to(states, self.group))
        return self._column_input[1]

    def row_output(self, summand: Tensor) -> Tensor:
        """Sum the ranks' outputs of a row-parallel map, `[..., width]`, to hidden states between branches."""
        return reduce_from(summand, self.group)

    def row_input(self, whole: Tensor) -> Tensor:
        """Take this rank's input of a row-parallel map, `[..., width / ranks]`, from one that is whole in a branch."""
        return scatter_to(whole, -1, self.group)

    def copy_to(self, whole: Tensor) -> Tensor:
        """Use a tensor that is whole inside a branch differently on each rank: its gradient is summed over them."""
        return copy_to(whole, self.group)

    def as_dtensor(self, tensor: Tensor, mesh: DeviceMesh) -> Tensor:
        """Convert a tensor that is whole inside a branch to a replicated DTensor.

        Args:
            tensor: Equal on all ranks.
            mesh: The ranks, one axis.
        """
        return DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)

    def run_layer(self, layer: nn.Module, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run one layer.

        Args:
            layer: The layer.
            function: Its forward.
            args: Its arguments.
            kwargs: Those by name.
        """
        try:
            return function(*args, **kwargs)
        finally:
            self._column_input = None

    def run_branch(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a submodule in which a branch begins.

        Args:
            function: Its forward.
            args: Its arguments.
            kwargs: Those by name.
        """
        return function(*args, **kwargs)

    def alone(self) -> ReplicatedRegion:
        """Make the region of one layer that runs by itself, outside of its stack."""
        return self

    def whole_arguments(self, args: Any, kwargs: Any) -> Any:
        """Gather the hidden states among the arguments of a layer.

        Args:
            args: Arguments of the layer, by position.
            kwargs: Arguments by name.

        Returns:
            The new `args` and `kwargs`.
        """
        return args, kwargs


class SequenceRegion(ReplicatedRegion):
    """Region in which each rank has a part of the positions, from the first layer of a stack to the last.

    Gradients of tensors that are whole inside a layer are summands: each rank's is that of its own positions or heads,
    and the sum over the ranks is the gradient.

    Args:
        group: The ranks that share a matrix product.
        is_first: Whether the layer is the first of its stack.
        is_last: Whether it is the last.
        lengths: Lengths of the sequences that are split at the moment; layers of one stack share them.
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
        # Inside a branch hidden states are gathered already, and other arguments of the layer are always whole.
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
        function = with_hidden_first(function, args, kwargs)
        hidden, args, kwargs = take_hidden(args, kwargs)
        args, kwargs = tree_map_only(Tensor, self._copied_argument, (args, kwargs))
        self._arguments = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if self._is_first:
            local = self._lengths.add(hidden.shape[self._lengths.dim])
            hidden = scatter_to(hidden, self._lengths.dim, self.group, local=local)
        self._shape = hidden.shape
        # Dropout has to differ between parts of the sequence, which would otherwise all get the same mask.
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
        function = with_hidden_first(function, args, kwargs)
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
        hidden, dim = hidden_in(args, kwargs), self._lengths.dim
        return with_hidden(gather_from(hidden, dim, self.group, length=self._length(hidden)), args, kwargs)

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
    """Inside this context, gradients of whole parameters are summed over the ranks, in one all-reduce for the layer.

    Each rank's gradient, of a norm's weight for example, is that of its own positions only.
    """
    found = [
        (child, name, parameter)
        for child in layer.modules()
        for name, parameter in child._parameters.items()
        if parameter is not None and parameter.requires_grad and not isinstance(parameter, DTensor)
    ]
    copies = copy_all_to([parameter for _, _, parameter in found], group) if torch.is_grad_enabled() else []
    try:
        for (child, name, _), copied in zip(found, copies, strict=False):
            child.__dict__[name] = copied  # attribute look-up finds it before the parameter of that name
        yield
    finally:
        for child, name, _ in found:
            child.__dict__.pop(name, None)

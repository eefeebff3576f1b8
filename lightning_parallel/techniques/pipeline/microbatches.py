"""Cut a batch into microbatches, and merge their outputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_parallel.errors import ConfigurationError
from lightning_parallel.ranks.lock_step import said_by_all
from lightning_parallel.techniques.pipeline.joined import IN_ORDER, RowOrder, joined_rows
from lightning_parallel.techniques.pipeline.schedules import PipelinePolicy

IGNORED = -100
"""The label that no loss counts, unless it is told another one."""


class MicrobatchCounts:
    """The number of microbatches into which each batch is cut.

    Args:
        policy: The rules.
        num_ranks: Ranks that share the stack.
        same_stage: Ranks that hold the same layers, for host memory. They gather parameters for each microbatch.
    """

    def __init__(self, policy: PipelinePolicy, num_ranks: int, same_stage: ProcessGroup) -> None:
        self._policy, self._num_ranks, self._same_stage = policy, num_ranks, same_stage
        self._usual_size = 0

    def in_training(self, size: int) -> int:
        """Count the microbatches of a training batch of `size` samples.

        A smaller batch than usual is the last one of an epoch, for which idle stages are better than an error.

        Raises:
            ConfigurationError: If the batch cannot be cut as given, or into too few parts.
        """
        self._usual_size = max(self._usual_size, size)
        if size < self._usual_size:
            return self._policy.any_microbatches(size, self._num_ranks)
        return self._policy.training_microbatches(size, self._num_ranks)

    def in_evaluation(self, size: int) -> int:
        """Count the microbatches of a batch of `size` samples without backward. A collective of the same stage.

        The last batches of ranks may have different numbers of samples; one microbatch fits all of them.
        """
        count = self._policy.any_microbatches(size, self._num_ranks)
        if self._same_stage.size() > 1 and len(set(said_by_all(count, self._same_stage))) > 1:
            return 1
        return count


def batch_size_of(batch: Any) -> int:
    """The number of samples: the first dimension of the first tensor that has one.

    Raises:
        ConfigurationError: If there is no such tensor.
    """
    sizes: list[int] = [tensor.shape[0] for tensor in tensors_of(batch) if tensor.ndim]
    if not sizes or not sizes[0]:
        raise ConfigurationError(
            [
                f"a pipeline cuts each batch into microbatches, but this one ({type(batch).__name__}) has no tensor "
                "with samples along its first dimension; put the samples into tensors, or give schedule='turns' or "
                "pipeline=1"
            ]
        )
    return sizes[0]


def tensors_of(batch: Any, kinds: type | tuple[type, ...] = Tensor) -> list[Any]:
    """The tensors in nested containers and dataclasses, in order.

    Args:
        batch: Nested containers with tensors.
        kinds: What is looked for, where that is not tensors alone.
    """
    found: list[Any] = []

    def keep(value: Any) -> Any:
        found.append(value)
        return value  # goes into a copy of its dataclass, which may look at what it is given

    apply_to_collection(batch, kinds, keep)
    return found


def cut_batch(batch: Any, batch_size: int, count: int) -> list[Any]:
    """Cut a batch into equal microbatches.

    Tensors with `batch_size` entries along the first dimension are cut, and so are lists of that many texts or numbers;
    everything else goes whole into each microbatch.

    Args:
        batch: Nested containers with tensors `[batch_size, ...]`.
        batch_size: The number of samples.
        count: The number of microbatches, a divisor of `batch_size`.
    """
    size = batch_size // count

    def part(value: Any, index: int) -> Any:
        if isinstance(value, Tensor):
            is_batched = value.ndim > 0 and value.shape[0] == batch_size
            if not is_batched:
                return value
            rows = _rows(value, index * size, size)
            # Views count writes together: one into its own rows by a later microbatch would refuse this one's backward.
            return rows if rows.requires_grad else rows.data
        return value

    def lists(value: list[Any], index: int) -> Any:
        plain = all(isinstance(item, str | bytes | int | float) for item in value)
        if plain and len(value) == batch_size:
            return value[index * size : (index + 1) * size]
        return [cut(item, index) for item in value]

    def cut(value: Any, index: int) -> Any:
        if type(value) is list:
            return lists(value, index)
        if type(value) is dict:
            return {key: cut(item, index) for key, item in value.items()}
        if type(value) is tuple:
            return tuple(cut(item, index) for item in value)
        return apply_to_collection(value, Tensor, part, index)

    return [cut(batch, index) for index in range(count)]


def _rows(value: Tensor, first: int, count: int) -> Tensor:
    if value.layout is torch.strided:
        return value.narrow(0, first, count)
    rows = torch.arange(first, first + count, device=value.device)
    return value.to_sparse_coo().index_select(0, rows).to_sparse(layout=value.layout)  # type: ignore[no-any-return,call-arg]


def whole_in_parts(batch: Any) -> str:
    """The class of the first object of a batch that `cut_batch` leaves whole, such as a graph; empty without one."""
    if isinstance(batch, Mapping | list | tuple):
        values: Iterable[Any] = batch.values() if isinstance(batch, Mapping) else batch
    elif is_dataclass(batch) and not isinstance(batch, type):
        values = [getattr(batch, field.name, None) for field in fields(batch)]
    else:
        is_value = batch is None or isinstance(batch, Tensor | str | bytes | int | float)
        return "" if is_value else type(batch).__name__
    return next((found for value in values if (found := whole_in_parts(value))), "")


def with_own_containers(batch: Any) -> Any:
    """Copy a batch, but for its tensors: a step that takes entries out of it, or adds some, runs on it again.

    Args:
        batch: Nested containers with tensors.
    """
    if type(batch) is dict:
        return {key: with_own_containers(item) for key, item in batch.items()}
    if type(batch) in (list, tuple):
        return type(batch)(with_own_containers(item) for item in batch)
    return apply_to_collection(batch, Tensor, lambda tensor: tensor)


def has_uneven_entries(batch: Any, batch_size: int, count: int, ignored: Iterable[int] = (IGNORED,)) -> bool:
    """Whether entries that count differ from microbatch to microbatch: labels that are not ignored, or those of a mask.

    They are compared place by place within a sample, because a loss may leave out the first or the last one. A mask
    is a tensor of booleans, or of zeros and ones with two dimensions or more, of any dtype.

    Args:
        batch: Nested containers with tensors `[batch_size, ...]`.
        batch_size: The number of samples.
        count: The number of microbatches.
        ignored: Labels that losses leave out.
    """
    found: list[Tensor] = []

    def look(tensor: Tensor) -> None:
        if not tensor.ndim or tensor.shape[0] != batch_size or tensor.is_complex():
            return
        if tensor.layout is not torch.strided:
            found.append(torch.ones((), dtype=torch.bool, device=tensor.device))  # not looked into: it may be a mask
            return
        kept = [tensor] if tensor.dtype == torch.bool else []
        if not kept and not tensor.is_floating_point():
            kept = [tensor != label for label in ignored]
        if tensor.dtype != torch.bool and tensor.ndim > 1:
            kept.append((tensor != 0) & ((tensor == 0) | (tensor == 1)).all())
        for counted in kept:
            each = counted.reshape(count, batch_size // count, -1).sum(1)
            found.append((each != each[0]).any())

    for tensor in tensors_of(batch):
        look(tensor)
    return bool(torch.stack(found).any()) if found else False


def merge_outputs(outputs: Sequence[Any], size: int, order: RowOrder = IN_ORDER) -> Any:
    """Merge the outputs of equal microbatches into that of the whole batch.

    Tensors and lists with an entry for each sample are joined; other numbers are averaged.

    Args:
        outputs: The output of each microbatch, all of one structure.
        size: The number of samples of a microbatch.
        order: The order of rows that the step makes of samples: those of tensors with as many stand alike.

    Raises:
        ConfigurationError: For anything else that differs between microbatches.
    """
    if len(outputs) == 1:
        return outputs[0]
    is_list = lambda value: isinstance(value, list) and len(value) == size  # noqa: E731
    flat, specs = zip(*(tree_flatten(output, is_leaf=is_list) for output in outputs), strict=True)
    if any(spec != specs[0] for spec in specs):
        raise ConfigurationError(["the step returns something of another structure for each microbatch; " + _ADVICE])
    return tree_unflatten([_merge(values, size, order) for values in zip(*flat, strict=True)], specs[0])


def _merge(values: Sequence[Any], size: int, order: RowOrder) -> Any:
    first = values[0]
    if isinstance(first, Tensor):
        if first.ndim and first.shape[0] in (size, order.rows * size):
            return joined_rows(values, 0, order, size)
        if not first.ndim and first.is_floating_point():
            return torch.stack(list(values)).mean(0)
        is_same = all(torch.equal(first, value) for value in values)
    elif isinstance(first, list):
        return [item for value in values for item in value]
    elif isinstance(first, float):
        return sum(values) / len(values)
    else:
        is_same = all(value == first for value in values)
    if is_same:
        return first
    form = f"a tensor of shape {tuple(first.shape)}" if isinstance(first, Tensor) else type(first).__name__
    raise ConfigurationError([f"the step returns {form} that differs from microbatch to microbatch; " + _ADVICE])


_ADVICE = "return tensors with a row for each sample, or means over samples, or give schedule='turns' or pipeline=1"

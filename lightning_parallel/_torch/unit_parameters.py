"""Units of FSDP2, their parameters and the order of their calls: private or version-dependent names of torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

_gathered: WeakValueDictionary[int, Any] = WeakValueDictionary()
"""Number of a shard in memory -> torch's record of its parameter, of those that `gathered_of` has returned.

A weak reference to the shard itself would end ``module.to(device)``, which swaps tensors that nobody refers to.
"""


def parameter_groups(unit: FSDPModule) -> list[Any]:
    """`FSDPState._fsdp_param_groups`, since 2.13, and `_fsdp_param_group` before; no public spelling."""
    state = unit._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def sharded_parameters(unit: FSDPModule) -> list[Tensor]:
    """The shards of the parameters of `unit`, in an order that all ranks share."""
    return [parameter.sharded_param for group in parameter_groups(unit) for parameter in group.fsdp_params]


def forward_order(units: Sequence[FSDPModule]) -> list[int]:
    """The numbers of `units` in the order in which their forward has run since the last backward.

    `FSDPCommContext.post_forward_order`, since 2.4, by which torch gathers parameters ahead; no public spelling.
    """
    groups = [(number, group) for number, unit in enumerate(units) for group in parameter_groups(unit)]
    numbers = {id(group): number for number, group in groups}
    ran = getattr(groups[0][1], "comm_ctx", None) if groups else None
    return [numbers[id(group)] for group in tuple(ran.post_forward_order) if id(group) in numbers] if ran else []


def entered_units(units: Sequence[FSDPModule]) -> list[int]:
    """The numbers of `units` whose forward has begun and is not over.

    `FSDPParamGroup._training_state`, since 2.4; no public spelling.
    """
    return [
        number
        for number, unit in enumerate(units)
        if any(group._training_state.name == "FORWARD" for group in parameter_groups(unit))
    ]


def gathered_parameters(unit: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of a parameter's shard and its gathered form, for those of `unit` that were gathered before.

    `FSDPParam._unsharded_param`, since 2.4; no public spelling.
    """
    assert isinstance(unit, FSDPModule)
    for group in parameter_groups(unit):
        for parameter in group.fsdp_params:
            if hasattr(parameter, "_unsharded_param"):
                yield parameter.sharded_param, parameter._unsharded_param


def train_gathered(shard: Tensor) -> None:
    """Let the gathered form of a shard be trained if the shard is, where it is gathered now.

    Args:
        shard: Any DTensor; what is no shard of a unit is left.
    """
    parameter = _gathered.get(id(shard))
    if parameter is not None and parameter.sharded_param is shard and parameter.sharded_state.name == "UNSHARDED":
        parameter._unsharded_param.requires_grad_(shard.requires_grad)


def is_shard(tensor: Tensor) -> bool:
    """Whether `tensor` is the shard of a parameter that its unit gathers."""
    parameter = _gathered.get(id(tensor))
    return parameter is not None and parameter.sharded_param is tensor


def keeps_gradient(shard: Tensor) -> bool:
    """Whether the gathered form of a shard keeps a gradient that is not reduced yet.

    `FSDPParam.unsharded_accumulated_grad`, since 2.4; since 2.15 the gathered form's own is meant by it.

    Args:
        shard: Any DTensor.
    """
    parameter = _gathered.get(id(shard))
    if parameter is None or not is_shard(shard) or not hasattr(parameter, "_unsharded_param"):
        return False
    return parameter._unsharded_param.grad is not None or parameter.unsharded_accumulated_grad is not None


def drop_gradient(shard: Tensor) -> None:
    """Drop the gradient that `keeps_gradient` has found."""
    parameter = _gathered[id(shard)]
    parameter._unsharded_param.grad = None
    if parameter.unsharded_accumulated_grad is not None:  # since 2.15, that was the same
        parameter.unsharded_accumulated_grad = None


class GatheredParameter:
    """A parameter of a unit, and what a step has written into its gathered form.

    `FSDPParam.sharded_state`, `fsdp_placement`, `mesh_info`, `all_gather_outputs`, `_orig_size`, `_module_info`, and
    more, since 2.4; no public spelling.

    Args:
        parameter: torch's record of it.
    """

    def __init__(self, parameter: Any) -> None:
        self._parameter = parameter
        self._version: int | None = None
        self._is_trained = True

    def note_trained(self) -> None:
        """Note whether the shard is trained, before a step, and let its gathered form be as it is."""
        shard, whole = self._forms()
        self._is_trained = shard.requires_grad
        if whole is not None:
            whole.requires_grad_(self._is_trained)

    def keep_trained(self) -> None:
        """Train both forms or none, as code since the last call has set `requires_grad` of what it found.

        torch takes it over from the shard when it gathers; what is set while the parameter is gathered, it forgets.
        """
        shard, whole = self._forms()
        if whole is not None and whole.requires_grad != self._is_trained:
            shard.requires_grad_(whole.requires_grad)
        self.note_trained()

    def _forms(self) -> tuple[Tensor, Tensor | None]:
        """The shard, and the gathered form, once there has been one."""
        return self._parameter.sharded_param, getattr(self._parameter, "_unsharded_param", None)

    @property
    def place(self) -> tuple[nn.Module, str]:
        """The module that holds it, and its name there."""
        return self._parameter._module_info.module, self._parameter._module_info.param_name

    @property
    def is_gathered(self) -> bool:
        """Whether the gathered form has its memory now."""
        return bool(self._parameter.sharded_state.name == "UNSHARDED")

    @property
    def dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        """The dtype of the gathered form, and that of the shard."""
        return self.whole.dtype, self._parameter.sharded_param.dtype

    @property
    def whole(self) -> Tensor:
        """The gathered form."""
        whole: Tensor = self._parameter._unsharded_param
        return whole.detach()

    def was_marked(self) -> bool:
        """Whether it was written since the last call in a way that is seen without a look at its values.

        torch counts operations in place; ``parameter.data = values`` gives it other memory.
        """
        if not hasattr(self._parameter, "_unsharded_param"):  # it was never gathered
            return False
        before, self._version = self._version, self._parameter._unsharded_param._version
        return self._is_replaced or before not in (None, self._version)

    @property
    def _is_replaced(self) -> bool:
        outputs = self._parameter.all_gather_outputs
        if len(outputs) != 1 or self._has_own_form:
            return False
        return bool(_local(self._parameter._unsharded_param).data_ptr() != outputs[0].data_ptr())

    @property
    def _has_own_form(self) -> bool:
        return hasattr(_local(self._parameter.sharded_param), "fsdp_post_all_gather")

    def differs(self) -> bool:
        """Whether its gathered values are no longer those of this rank's shard: writes through ``.data`` count so."""
        shard, part = _local(self._parameter.sharded_param), self._part()
        if part is None:
            return False
        expected = shard.detach().to(part.device, part.dtype)
        # As bytes: what is not a number equals itself.
        return not torch.equal(part.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))

    def keep(self) -> bool:
        """Write this rank's part of the gathered values into its shard. False where the shard has another form."""
        shard, part = _local(self._parameter.sharded_param).detach(), self._part()
        if part is None or part.dtype != shard.dtype:
            return False
        shard.copy_(part)
        return True

    def take_back_memory(self) -> bool:
        """Undo ``parameter.data = values``: torch gathers into the memory from before. Whether there was anything."""
        if not self._is_replaced:
            return False
        parameter = self._parameter
        strides = parameter._contiguous_orig_stride
        parameter._unsharded_param.data = parameter.all_gather_outputs[0].as_strided(parameter._orig_size, strides, 0)
        return True

    def _part(self) -> Tensor | None:
        """This rank's part of the gathered values; none where the shard has another shape."""
        parameter = self._parameter
        shard, whole = _local(parameter.sharded_param), _local(parameter._unsharded_param).detach()
        if self._has_own_form or whole.ndim != shard.ndim:
            return None
        dim, size = parameter.fsdp_placement.dim, getattr(parameter.mesh_info, "shard_mesh_size", 1)
        part = whole
        if whole.ndim > dim:
            step = -(-whole.shape[dim] // size)
            start = min(getattr(parameter.mesh_info, "shard_mesh_rank", 0) * step, whole.shape[dim])
            part = whole.narrow(dim, start, min(step, whole.shape[dim] - start))
        return part if part.shape == shard.shape else None


def gathered_of(unit: nn.Module) -> list[GatheredParameter]:
    """The parameters of `unit`, in an order that all ranks share."""
    assert isinstance(unit, FSDPModule)
    found = [parameter for group in parameter_groups(unit) for parameter in group.fsdp_params]
    _gathered.update((id(parameter.sharded_param), parameter) for parameter in found)
    return [GatheredParameter(parameter) for parameter in found]


class GatheredWrites:
    """Whether code writes into the gathered parameters of a unit.

    Args:
        unit: The unit, gathered, before the code runs.
    """

    def __init__(self, unit: nn.Module) -> None:
        self._parameters = gathered_of(unit)
        self._marked = [each.was_marked() for each in self._parameters]

    def have_happened(self, call: int) -> bool:
        """Whether there was a write.

        Args:
            call: The number of this run. What is written in place through ``parameter.data`` is seen in values only,
                which are compared in the first runs, and then ever more rarely.
        """
        pairs = zip(self._parameters, self._marked, strict=True)
        if any(each.was_marked() and not before for each, before in pairs):
            return True
        looks = call <= 4 or call & (call - 1) == 0
        return looks and any(each.is_gathered and each.differs() for each in self._parameters)


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor

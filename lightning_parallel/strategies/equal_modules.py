"""Ranks have built the same module and the same optimizers: a look before anything of them is sent."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_parallel.module.differences import first_of
from lightning_parallel.ranks.objects import is_shared, of_all_ranks

Form = dict[str, str]
"""Names, in their order -> what is said of each."""
_MOST = 4
"""Differences that are said in full."""
_MODULES = (
    "ranks have built {0} differently: {1}. Build it alike on all ranks: take what depends on data, such as a "
    "vocabulary or a number of classes, from all of it, and use sorted(...) for what comes from a set"
)
_OPTIMIZERS = (
    "ranks have made the optimizers of {0} differently: {1}. Give them the same parameters in the same order on all "
    "ranks, and use sorted(...) for what comes from a set"
)


def different_modules(module: nn.Module) -> list[str]:
    """Reasons why ranks cannot train the module that each of them has built; empty if they are alike. A collective.

    Without it, ranks send each other tensors by their place: a sum of two parameters, or a wait that never ends.

    Args:
        module: The user's module, plain or parallel.
    """
    if not is_shared():
        return []
    form = {f"parameter {name}": _form_of(parameter) for name, parameter in module.named_parameters()}
    form |= {f"buffer {name}": _form_of(buffer) for name, buffer in module.named_buffers()}
    return [_MODULES.format(type(module).__name__, words) for words in _differences(form)]


def different_optimizers(module: nn.Module, optimizers: Sequence[Optimizer]) -> list[str]:
    """Reasons why ranks cannot update together; empty if their optimizers have the same parameters. A collective.

    Args:
        module: The user's module.
        optimizers: Those that ``configure_optimizers`` has made on this rank.
    """
    if not is_shared():
        return []
    names = {parameter: name for name, parameter in module.named_parameters()}
    form: Form = {}
    for number, optimizer in enumerate(optimizers):
        form[f"optimizer {number}"] = f"{type(optimizer).__name__}, groups: {len(optimizer.param_groups)}"
        for place, group in enumerate(optimizer.param_groups):
            parts = [names.get(parameter, "a parameter of no name") for parameter in group["params"]]
            form |= {f"{each} of optimizer {number}": f"in group {place}" for each in parts}
    return [_OPTIMIZERS.format(type(module).__name__, words) for words in _differences(form)]


def _form_of(tensor: Tensor) -> str:
    if is_lazy(tensor):
        return "without a shape yet"
    is_frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}{', frozen' if is_frozen else ''}"


def _differences(form: Form) -> list[str]:
    """Words on what the first rank that differs from rank 0 has in another way. A collective."""
    digests = of_all_ranks(hashlib.sha256(repr(list(form.items())).encode()).digest())
    rank = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if rank is None:
        return []
    # Only now, since names of thousands of tensors from thousands of ranks are many bytes.
    forms = of_all_ranks(form if dist.get_rank() in (0, rank) else {})
    return [_in_words(forms[0], forms[rank], rank)]


def _in_words(first: Form, other: Form, rank: int) -> str:
    only_first, only_other = (
        [name for name in first if name not in other],
        [name for name in other if name not in first],
    )
    found = [f"rank 0 alone has {first_of(only_first)}"] if only_first else []
    found += [f"rank {rank} alone has {first_of(only_other)}"] if only_other else []
    changed = [name for name in first if name in other and first[name] != other[name]]
    found += [f"{name} is {first[name]} on rank 0, {other[name]} on rank {rank}" for name in changed[:_MOST]]
    if len(changed) > _MOST:
        found.append(f"{len(changed) - _MOST} more differ")
    if not found:
        one, two = next((a, b) for a, b in zip(first, other, strict=True) if a != b)
        found.append(f"they are in another order, {one} on rank 0 where {two} is on rank {rank}")
    return "; ".join(found)

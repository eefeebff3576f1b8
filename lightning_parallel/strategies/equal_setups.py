"""Ranks have the same module, optimizers and settings of the Trainer: a look before anything is sent."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from lightning.pytorch import callbacks
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_parallel import _torch
from lightning_parallel.module.differences import first_of
from lightning_parallel.module.kept_state import is_persistent
from lightning_parallel.ranks.objects import is_shared, of_all_ranks

if TYPE_CHECKING:
    from lightning.pytorch import Callback, Trainer

_SETTINGS = (
    *("accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm", "precision", "fast_dev_run"),
    *("max_epochs", "min_epochs", "max_steps", "min_steps", "overfit_batches", "num_sanity_val_steps"),
    *("limit_train_batches", "limit_val_batches", "limit_test_batches", "limit_predict_batches"),
    *("val_check_interval", "check_val_every_n_epoch", "reload_dataloaders_every_n_epochs"),
)
"""Attributes of the Trainer by which ranks decide when they meet, or what they compute."""
_MEETING = (
    callbacks.BaseFinetuning,
    callbacks.BatchSizeFinder,
    callbacks.Checkpoint,
    callbacks.EarlyStopping,
    callbacks.GradientAccumulationScheduler,
    callbacks.LearningRateFinder,
    callbacks.ModelPruning,
    callbacks.StochasticWeightAveraging,
    callbacks.Timer,
    callbacks.WeightAveraging,
)
"""Callbacks in which ranks meet, or that change what they train; others, such as a progress bar, one rank may have."""
_OWN = "lightning_parallel.callbacks."
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
_TRAINERS = (
    "ranks run with other settings than others: {}. Give the Trainer of each rank the same ones and the same "
    "callbacks; what one rank is to do alone, such as writing to a log, a hook does under trainer.is_global_zero"
)


def different_settings(trainer: Trainer) -> list[str]:
    """Reasons why the Trainers of ranks cannot run together; empty if they meet in the same places. A collective.

    Args:
        trainer: That of this rank.
    """
    if not is_shared():
        return []
    form = {name: repr(getattr(trainer, name, None)) for name in _SETTINGS}
    given: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    meeting = [each.state_key for each in given if _meets(each)]
    form |= {f"callback {key}": f"there {meeting.count(key)} times" for key in meeting}
    return [_TRAINERS.format(words) for words in _differences(form)]


def _meets(callback: Callback) -> bool:
    return isinstance(callback, _MEETING) or type(callback).__module__.startswith(_OWN)


def different_modules(module: nn.Module, left_out: Collection[str] = ()) -> list[str]:
    """Reasons why ranks cannot train the module that each of them has built; empty if they are alike. A collective.

    Without it, ranks send each other tensors by their place: a sum of two parameters, or a wait that never ends.

    Args:
        module: The user's module, plain or parallel.
        left_out: Names of what is not sent. Nor are buffers looked at that are not saved, such as tables that grow with
            the samples of each rank.
    """
    if not is_shared():
        return []
    form = {f"parameter {name}": _form_of(parameter) for name, parameter in module.named_parameters()}
    saved = ((name, buffer) for name, buffer in module.named_buffers() if is_persistent(module, name))
    form |= {f"buffer {name}": _form_of(buffer) for name, buffer in saved}
    form = {name: words for name, words in form.items() if name.partition(" ")[2] not in left_out}
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
    dtype, memory = str(tensor.dtype).removeprefix("torch."), ""
    if isinstance(tensor, nn.Parameter):
        return f"{list(tensor.shape)} {dtype}{'' if tensor.requires_grad else ', frozen'}"
    if tensor.layout is not torch.strided or _torch.dense_parts.shared_dims(tensor):
        parts = [list(part.shape) for part in _torch.dense_parts.dense_parts((tensor.detach(),))]
        memory = f" of {str(tensor.layout).removeprefix('torch.')} memory {parts}"
    return f"{list(tensor.shape)} {dtype}{memory}"


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
    only_first = [name for name in first if name not in other]
    only_other = [name for name in other if name not in first]
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

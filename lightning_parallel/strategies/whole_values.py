"""Reading, copying, logging and saving by hooks, of a module that is sharded or cut: whole values, or a refusal."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from lightning_parallel import _lightning, _torch
from lightning_parallel.errors import line_of_user
from lightning_parallel.module.placeholders import Placeholder
from lightning_parallel.ranks.dtensors import sharded_like
from lightning_parallel.ranks.host_reads import HostReads, at
from lightning_parallel.ranks.mesh import Mesh
from lightning_parallel.ranks.stage_owners import broadcast_object
from lightning_parallel.ranks.step_reads import StepReads
from lightning_parallel.strategies.finetuning import thawed_ones_found

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

    from lightning_parallel._torch.written_numbers import Number


_KEPT = (
    "p.grad is None {}, in the middle of a window of accumulated gradients: each rank keeps its own until they are "
    "reduced with the last microstep, where one process has their sum so far. Read gradients in on_after_backward, "
    "before which they are reduced each time unless accumulation_sync='last' is given, or in on_before_optimizer_step, "
    "or give accumulation_sync='every'; what clears them is the zero_grad of self.optimizers(), and not that of "
    "the module"
)


@contextlib.contextmanager
def whole_values(
    trainer: Trainer, module: LightningModule, mesh: Mesh, tell_written: Callable[[str, Number], None]
) -> Iterator[None]:
    """Inside this context, nobody takes a part of a tensor for the whole, and shards can be assigned. A collective.

    Args:
        trainer: The trainer, whose callbacks log through the module.
        module: The module, made parallel.
        mesh: The ranks.
        tell_written: Called where user code writes into a DTensor, with what it calls and the numbers it gives.
    """
    mark = broadcast_object(str(time.time_ns()), 0, mesh.host_group) if dist.get_world_size() > 1 else ""
    reads = HostReads(f"lightning_parallel/{mark}")
    in_steps = StepReads(reads.meet, rank_zero_info)
    reader = _torch.host_reads.Reader(
        reads.whole, reads.refuse, reads.meet, reads.is_asked, in_steps.announce, reads.draws_whole
    )
    _torch.part_operations.ask_readers(sharded_like)
    is_cut = any(isinstance(parameter, Placeholder) for parameter in module.parameters())
    stages = mesh.pipeline_host_group
    with (
        _torch.host_reads.data_of_shards_set(),
        _torch.tensors.data_checked(_check_data) if is_cut else contextlib.nullcontext(),
        thawed_ones_found(mesh.host_group, stages, reads) if stages is not None else contextlib.nullcontext(),
        _torch.host_reads.reads_intercepted(module, reader, sharded_like),
        _torch.whole_operands.operands_made_whole(
            reads.user_code_runs, in_steps.whole, sharded_like, _KeptGradients().tell, tell_written
        ),
        _lightning.gradient_norms_read(functools.partial(_norms_of_all, stages, reads)),
        _logging_whole_values(trainer, module, reads),
    ):
        yield


@contextlib.contextmanager
def _logging_whole_values(trainer: Trainer, module: LightningModule, reads: HostReads) -> Iterator[None]:
    """Let ``self.log``, of the module and of callbacks, take whole values of shards, so that metrics hold them."""
    plain = module.log

    def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(value, Placeholder):
            value.refuse(f"self.log({name!r})")
        if isinstance(value, DTensor):
            device = value.device
            value = reads.whole(value, f"self.log({name!r})").to(device)
        plain(name, value, *args, **kwargs)

    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    holders = [holder for holder in (module, *callbacks) if getattr(holder, "log", None) == plain]
    before = [(holder, holder.__dict__.get("log")) for holder in holders]
    for holder in holders:
        holder.__dict__["log"] = log
    try:
        yield
    finally:
        for holder, own in before:
            holder.__dict__.pop("log", None)
            if own is not None:
                holder.__dict__["log"] = own


def _norms_of_all(stages: ProcessGroup | None, reads: HostReads, norms: Mapping[str, Any]) -> dict[str, float]:
    """Norms of gradients by name, of other stages, too; without those that no stage has. A collective of all ranks."""
    found = [{name: float(norm) for name, norm in norms.items() if not isinstance(norm, Placeholder)}]
    if stages is not None:
        found = reads.gather("grad_norm", found[0], stages)
    by_name = {name: norm for each in found for name, norm in each.items()}
    return {name: by_name[name] for name in norms if name in by_name}


class _KeptGradients:
    """Says once that a hook has found no gradient where each rank keeps its own."""

    def __init__(self) -> None:
        self._is_told = False

    def tell(self) -> None:
        if not self._is_told:
            self._is_told = True
            rank_zero_warn(_KEPT.format(at(line_of_user())))


def _check_data(tensor: Tensor, values: Any) -> None:
    if isinstance(values, Placeholder) and not isinstance(tensor, Placeholder):
        values.refuse("an assignment to parameter.data")

"""Compression of DDP's gradients in transit: none, half precision, or low-rank factors.

Source: `torch.distributed.algorithms.ddp_comm_hooks`; PowerSGD is Vogels et al. 2019.
"""

from __future__ import annotations

from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

HOOKS = ("none", "fp16", "bf16", "powersgd")
_DEFAULT_POWERSGD_RANK = 4


def races_with_search(hook: str, backend: str) -> bool:
    """Whether ranks may wait for ever where DDP looks for unused parameters in each step.

    PowerSGD starts a second collective when its first has ended, in a thread of gloo, at no fixed place among that in
    which DDP says which parameters were used. Over NCCL, collectives are put in order when the first one is started.

    Args:
        hook: The name of a hook, of `HOOKS`.
        backend: The backend of the process group.
    """
    return hook == "powersgd" and "nccl" not in backend


def comm_hook_violations(
    hook: str, powersgd_rank: int | None, backend: str, *, finds_unused: bool = False
) -> list[str]:
    """Reasons why `hook` cannot be used on `backend`; empty if it can.

    Args:
        hook: The name of a hook, of `HOOKS`.
        powersgd_rank: The rank of PowerSGD's factors, if it was given.
        backend: The backend of the process group.
        finds_unused: Whether DDP looks for unused parameters in each step.
    """
    found = []
    if hook not in HOOKS:
        found.append(f"comm_hook={hook!r} is unknown; possible: {', '.join(HOOKS)}")
    if hook == "bf16" and "nccl" not in backend:
        found.append(f"comm_hook='bf16' needs NCCL, but the backend is {backend}; give comm_hook='fp16' or 'none'")
    if finds_unused and races_with_search(hook, backend):
        found.append(
            f"comm_hook={hook!r} and find_unused_parameters=True: over {backend}, ranks may send in different orders "
            "and wait for ever; give comm_hook='fp16', or freeze the parameters that no step uses"
        )
    if powersgd_rank is not None and hook != "powersgd":
        found.append(
            f"powersgd_rank={powersgd_rank} belongs to comm_hook='powersgd', but comm_hook is {hook!r}; leave it out"
        )
    if powersgd_rank is not None and powersgd_rank < 1:
        found.append(f"powersgd_rank={powersgd_rank} must be at least 1; 1 to 8 are usual")
    return found


def register_comm_hook(model: DistributedDataParallel, hook: str, *, powersgd_rank: int | None) -> None:
    """Reduce the gradients of `model` through a communication hook; Lightning's own strategy does so on CUDA only.

    Args:
        model: The module in DDP.
        hook: The name of a hook, of `HOOKS`.
        powersgd_rank: The rank of PowerSGD's factors; ``None`` for the default.
    """
    if hook == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif hook == "bf16":
        model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    elif hook == "powersgd":
        rank = powersgd_rank or _DEFAULT_POWERSGD_RANK
        # The first two steps are not compressed: the least that torch allows with error feedback and warm start.
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

"""Names of actions that Lightning's loops, and this package, tell the profiler."""

from __future__ import annotations

WAITING = "[Pipeline]waiting"
"""A rank of a pipeline tells by this name that it waits for another one."""

_PHASES = {
    ("[_TrainingEpochLoop", "train_dataloader_next"): "data",
    ("[Strategy", "batch_to_device"): "copy",
    ("[Strategy", "training_step"): "forward",
    ("[Strategy", "backward"): "backward",
    ("[LightningModule", "on_after_backward"): "other",  # behind the last collective of backward
    ("[LightningModule", "optimizer_step"): "optimizer",
    ("[LightningModule", "optimizer_zero_grad"): "optimizer",
    ("optimizer_step", ""): "optimizer",  # under manual optimization
    ("save_checkpoint", ""): "checkpoint",
    ("[Pipeline", "waiting"): "bubble",
}


def phase_of(action: str) -> str | None:
    """The phase of a training step that an action is; ``None`` for those that are part of another.

    Args:
        action: As Lightning names it, such as ``"[Strategy]DDPStrategy.training_step"``. These names, since 2.0, wait
            for hooks around what they stand for.
    """
    owner, _, rest = action.partition("]")
    return _PHASES.get((owner, rest.rpartition(".")[2]))

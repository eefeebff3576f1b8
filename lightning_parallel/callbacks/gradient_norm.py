"""`GradientNorm`: the norm of all gradients, right over shards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning.pytorch import Callback
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch.optim import Optimizer
from typing_extensions import override

from lightning_parallel import _lightning
from lightning_parallel.callbacks.strategy_protocol import refuse, updates_in_backward
from lightning_parallel.errors import check
from lightning_parallel.techniques.clipping import gradient_norm

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class GradientNorm(Callback):
    """Log the total norm of the gradients at each optimizer step, before Lightning clips them.

    The norm is that of the whole model: over all shards and all parameter groups, tied weights once. It is equal on
    all ranks. With several optimizers, each has a name with its number: ``grad_norm_0``, ``grad_norm_1``.

    Under manual optimization a module that calls `clip_gradients` does so before the optimizer steps, so the norm is
    the one after clipping there. In fp16, a step that is skipped because its gradients are not finite logs that norm.

    Args:
        name: The name in the log.
        norm_type: The order of the norm, more than 0; also ``float("inf")``.

    Raises:
        ConfigurationError: For an order that is not more than 0; at the start of `fit`, under a strategy which uses
            gradients up during backward, so that they are never all there.

    Example:
        >>> Trainer(strategy="fsdp_custom", devices=4, callbacks=[GradientNorm()])
    """

    def __init__(self, name: str = "grad_norm", *, norm_type: float = 2.0) -> None:
        check([] if norm_type > 0 else [f"norm_type={norm_type} is no order of a norm; give more than 0, such as 2.0"])
        self._name = name
        self._norm_type = norm_type

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and updates_in_backward(trainer):
            refuse(
                trainer,
                [
                    "GradientNorm takes the norm of all gradients, but optimizer_in_backward=True uses each up at "
                    "once, so they are never all there; leave one of the two out"
                ],
            )

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        norm = gradient_norm((p for group in optimizer.param_groups for p in group["params"]), self._norm_type)
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None and _lightning.handles_unscaling(optimizer):
            norm = norm / scaler.get_scale()  # such an optimizer divides by the loss scale only when it steps
        pl_module.log(self._name_for(trainer, optimizer), norm)

    def _name_for(self, trainer: Trainer, optimizer: Optimizer) -> str:
        if len(trainer.optimizers) == 1:
            return self._name
        plain = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        number = next(number for number, other in enumerate(trainer.optimizers) if other is plain)
        return f"{self._name}_{number}"

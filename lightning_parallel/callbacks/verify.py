"""`Verify`: ranks that must hold equal values do, while a run goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback
from typing_extensions import override

from lightning_parallel.errors import RanksDifferError, check
from lightning_parallel.module.placeholders import is_placeholder
from lightning_parallel.ranks.fingerprints import (
    Fingerprint,
    differing,
    hash_of_names,
    of_optimizer,
    of_parameters,
    parted_in_words,
)

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class Verify(Callback):
    """End a run whose ranks have drifted apart, at the step in which that is noticed.

    Ranks that must hold equal values hash them on the host, and compare the hashes, before the first step and after
    every so many: parameters, or the same shards of them, states of optimizers, learning rates and the number of steps.
    They drift apart where a rank does something by itself: where a hook draws random numbers or writes weights on rank
    0 only, where gradients are not reduced, where hardware computes something else. Buffers may differ, as running
    statistics do under `ddp_custom`.

    It costs a copy of a rank's parameters and states to the host, one tensor at a time, and one exchange of a few
    numbers. Values have to be equal in every bit. Not run on a GPU, where kernels that add in no fixed order may give
    ranks that compute one gradient each for themselves, under tensor parallelism, other last digits.

    Args:
        every: The number of optimizer steps from one comparison to the next, at least 1.

    Raises:
        ConfigurationError: For less than one step.
        RanksDifferError: During `fit`, when ranks differ: what differs, on which ranks, and since when.

    Example:
        >>> Trainer(strategy="ddp_custom", devices=4, callbacks=[Verify(every=1000)])
    """

    def __init__(self, every: int = 1000) -> None:
        check([] if every >= 1 else [f"every={every} is no number of optimizer steps; give 1 or more, such as 1000"])
        self._every = every
        self._agreed: int | None = None
        """The step after which ranks were equal last; ``None`` before the first comparison of a fit."""

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._agreed = None
        self._compare(trainer, pl_module)

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        if self._agreed is not None and trainer.global_step >= self._agreed + self._every:
            self._compare(trainer, pl_module)

    def _compare(self, trainer: Trainer, module: LightningModule) -> None:
        if trainer.world_size > 1 and (found := differing(_held(trainer, module))):
            if trainer.global_rank != 0:
                raise RanksDifferError("ranks hold different values; rank 0 says which")
            raise RanksDifferError(parted_in_words(found, trainer.global_step, self._agreed))
        self._agreed = trainer.global_step


def _held(trainer: Trainer, module: LightningModule) -> list[Fingerprint]:
    own = {name: parameter for name, parameter in module.named_parameters() if not is_placeholder(parameter)}
    names = {parameter: name for name, parameter in own.items()}
    found = list(of_parameters(own.items()))
    for number, optimizer in enumerate(trainer.optimizers):
        label = type(optimizer).__name__ + (f" {number}" if len(trainer.optimizers) > 1 else "")
        found += of_optimizer(optimizer, label, names)
    return [*found, ("options", "the number of steps", hash_of_names([str(trainer.global_step)]))]

"""The steps of a module that DDP wraps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch.distributed as dist
from lightning.pytorch.overrides.distributed import prepare_for_backward
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_parallel.policies import Policies
from lightning_parallel.steps import StepHooks
from lightning_parallel.techniques.accumulation import AccumulationWindow
from lightning_parallel.techniques.replicate import reduce_gradients

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule


class DDPSteps(StepHooks):
    """Wraps a module in DDP, and again when other parameters are to be trained, until `unwrap`.

    Args:
        policies: The rules.
        module: The user's module.
        wrap: Wraps it. A collective.
        set_model: Takes what Lightning is to call: the wrapped module, or the module itself.
    """

    def __init__(
        self,
        policies: Policies,
        module: LightningModule,
        *,
        wrap: Callable[[LightningModule], DistributedDataParallel],
        set_model: Callable[[nn.Module], None],
    ) -> None:
        super().__init__(policies)
        self._module, self._wrap, self._set_model = module, wrap, set_model
        self._window = AccumulationWindow()
        self._has_own_forward = "forward" in vars(module)
        self._wrap_again()

    def _wrap_again(self) -> None:
        self._set_model(self._module)
        self._wrapped = self._wrap(self._module)
        self._reduced = _trainable(self._module)
        self._set_model(self._wrapped)

    def unwrap(self) -> None:
        """Let Lightning call the module itself again."""
        self._set_model(self._module)
        # Lightning's redirection of forward leaves a bound method on the module, which copies of it would share.
        if not self._has_own_forward:
            vars(self._module).pop("forward", None)

    @override
    def begin(self) -> None:
        trainable = _trainable(self._module)
        # Under manual optimization, a step freezes the parameters of the other optimizers for a while: those that are
        # trainable may be fewer than DDP reduces, but no others.
        is_automatic = self._module.automatic_optimization
        is_other = trainable != self._reduced if is_automatic else not trainable <= self._reduced
        if is_other and self._module.training:
            # DDP reduces the parameters that were trainable when it was made, and waits for all of them. The new one
            # would not reduce gradients held for parameters that are frozen now, so they are reduced before.
            self.before_update()
            self._wrap_again()

    @override
    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        if self._policies.accumulation_sync == "every":
            yield
            return
        # Both: DDP reduces no bucket here, and the window notes that there is something left to reduce.
        with self._window.held(), self._wrapped.no_sync():
            yield

    @override
    def before_backward(self, loss: Tensor) -> None:
        # DDP prepares its reducer at the end of forward, which under manual optimization comes after backward.
        if not self._module.automatic_optimization:
            prepare_for_backward(self._wrapped, loss)

    @override
    def after_backward(self) -> None:
        self._window.after_backward()

    @override
    def before_update(self) -> None:
        """Reduce gradients that were held: manual optimization may step without a backward in which DDP reduces."""
        if self._window.take_rest():
            assert dist.group.WORLD is not None
            reduce_gradients(list(self._module.parameters()), dist.group.WORLD)


def _trainable(module: nn.Module) -> set[nn.Parameter]:
    return {parameter for parameter in module.parameters() if parameter.requires_grad}

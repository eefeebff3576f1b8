"""The number by which a backward multiplies the gradients of a loss: a loss scale, or what a user's `backward` does."""

from __future__ import annotations

from torch import Tensor


class BackwardScale:
    """The gradient with which a backward arrives at a loss, once that has passed all hooks; 1 until then.

    Args:
        loss: The loss; ``None`` where there is none.
    """

    def __init__(self, loss: Tensor | None = None) -> None:
        self.value: Tensor | float = 1.0
        if loss is not None and loss.grad_fn is not None:
            loss.grad_fn.register_prehook(self._note)

    def _note(self, gradients: tuple[Tensor, ...]) -> None:
        self.value = gradients[0].detach().clone()

    def over(self, other: BackwardScale) -> Tensor | None:
        """This one as a multiple of `other`; ``None`` where they are equal."""
        ratio = self.value / other.value
        return None if not isinstance(ratio, Tensor) or bool((ratio == 1.0).all()) else ratio

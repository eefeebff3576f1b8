"""Lightning's hooks around a step, handed on to `Steps`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_parallel.steps import Steps
from lightning_parallel.strategies.process_group import ProcessGroupStrategy
from lightning_parallel.strategies.sampling import PredictLockStep

_MIXED = (
    "A sharded parameter met a plain tensor: code reads the parameters of a layer outside of that layer's forward (a "
    "penalty over parameters() in the loss, a layer's weight used elsewhere, a call from a hook). Name the method that "
    "does so in forward_methods, give layers=[] so that all parameters are gathered around the step, or use "
    "zero1_custom, where parameters stay whole."
)


class SteppingStrategy(ProcessGroupStrategy):
    """A strategy whose steps are those of a sharded module."""

    _steps: Steps | None = None
    _lock_step: PredictLockStep | None = None

    @property
    def steps(self) -> Steps:
        """What happens around a step; exists while an entry point runs."""
        assert self._steps is not None
        return self._steps

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        self.steps.state_was_loaded()

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.steps.begin()
        output = super().training_step(*args, **kwargs)
        self.steps.after_forward()
        return output

    @override
    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        with self.steps.held():
            yield

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        self.steps.before_backward(closure_loss)

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        self.steps.after_backward()

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        def closure_then_reduce() -> Any:
            result = closure()
            self.steps.before_update()
            return result

        result = super().optimizer_step(optimizer, closure_then_reduce, model, **kwargs)
        self.steps.after_update(optimizer)
        return result

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        result = super().validation_step(*args, **kwargs)
        self.steps.after_evaluation()
        return result

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        result = super().test_step(*args, **kwargs)
        self.steps.after_evaluation()
        return result

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        result = super().predict_step(*args, **kwargs)
        self.steps.after_evaluation()
        if self._lock_step is not None and self._lock_step.is_short_after_this():
            super().predict_step(*args, **kwargs)  # the other ranks gather parameters for one batch more
            self.steps.after_evaluation()
        return result

    @override
    def on_validation_start(self) -> None:
        self.steps.begin()

    @override
    def on_test_start(self) -> None:
        self.steps.begin()

    @override
    def on_predict_start(self) -> None:
        self.steps.begin()
        assert self.lightning_module is not None
        self._lock_step = PredictLockStep(self.lightning_module.trainer)

    @override
    def on_predict_end(self) -> None:
        self._lock_step = None

    @override
    def on_exception(self, exception: BaseException) -> None:
        if any(words in str(exception) for words in ("mixed torch.Tensor and DTensor", "different mesh")):
            exception.add_note(_MIXED)

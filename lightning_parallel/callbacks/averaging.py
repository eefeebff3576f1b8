"""An exponential moving average of the weights, sharded as they are, for evaluation."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from typing_extensions import override

from lightning_parallel.callbacks.averages import Averages
from lightning_parallel.callbacks.non_finite import has_skipped_batch
from lightning_parallel.callbacks.strategy_protocol import refuse, writes_parts
from lightning_parallel.checkpoint.callback_tensors import TensorsOfRanks
from lightning_parallel.checkpoint.full_state import first_names
from lightning_parallel.checkpoint.full_state import full_state_dict as whole_model
from lightning_parallel.errors import check
from lightning_parallel.techniques.sharding import reshard_units

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.strategies import Strategy


class ExponentialMovingAverage(Callback):
    """Average the trainable parameters over the steps (Polyak and Juditsky 1992), and evaluate the average.

    ``average = decay * average + (1 - decay) * weights`` after a step; the first update takes the weights as they are,
    as `torch.optim.swa_utils.AveragedModel` does. A step is a training batch after which ``trainer.global_step`` has
    grown: accumulated microbatches do not count, and under manual optimization the steps of several optimizers in one
    batch count once; steps that `NonFinite` skips do not. Each rank holds the average of its own shards only, under a
    pipeline of those of its stages. That of 16-bit parameters is in 32 bits, because small changes would be rounded
    away.

    Training goes on from the raw weights, which are also those of checkpoints; the average is in the callback's own
    state there, whole (in the sharded form, each rank writes and reads its part), and goes on under any strategy and
    number of ranks. Validation during ``fit`` sees the average
    in the parameters' place, and so do ``validate``, ``test`` and ``predict`` of the same module afterwards, or with a
    checkpoint that has an average. Buffers are not averaged. A later fit of the same module goes on with its average.

    Args:
        decay: The share of the average that an update keeps, in ``[0, 1)``.
        every_n_steps: Update after the steps whose number is divisible by this.
        start_step: How many steps to leave out before the first update.
        swap_for_validation: Whether evaluation sees the average.

    Raises:
        ConfigurationError: For a setting out of range, and for a checkpoint whose averages do not fit the module.

    Example:
        >>> Trainer(strategy="fsdp_custom", callbacks=[ExponentialMovingAverage(0.9999)])
    """

    def __init__(
        self,
        decay: float = 0.999,
        *,
        every_n_steps: int = 1,
        start_step: int = 0,
        swap_for_validation: bool = True,
    ) -> None:
        check(_violations(decay, every_n_steps, start_step))
        self._decay = decay
        self._every_n_steps = every_n_steps
        self._start_step = start_step
        self._swaps = swap_for_validation
        self._average = Averages()
        self._raw = Averages(is_wide=False)
        self._parts: dict[str, Tensor] = {}
        self._steps = 0
        self._global_step = 0
        self._has_batches = False
        self._is_loaded = self._has_begun = False
        self._keeps = True
        self._module: weakref.ref[nn.Module] | None = None
        self._strategy: weakref.ref[Strategy] | None = None

    def full_state_dict(self, trainer: Trainer) -> dict[str, Tensor]:
        """The module's ``state_dict()`` with averages in place of weights, on the host of rank 0; ``{}`` elsewhere.

        A collective: call it on all ranks. Keys, shapes and dtypes are those of the plain module. It works in hooks
        and after ``fit`` has returned; before the first update these are the raw weights.

        Args:
            trainer: The trainer that has the module.

        Example:
            >>> weights = average.full_state_dict(trainer)
        """
        weights = whole_model(trainer)
        aliases = _aliases(trainer.lightning_module)
        for name in self._average.tensors:
            value = self._average.whole(name)
            for alias in aliases.get(name, ()):
                if alias in weights:
                    weights[alias] = value.to(weights[alias].dtype, copy=True)
        return weights

    # State ------------------------------------------------------------------------------------------------------

    @override
    def state_dict(self) -> dict[str, Any]:
        if writes_parts(self._strategy and self._strategy()) and self._average.is_here:
            return {"average": TensorsOfRanks(self._average.tensors), "steps": self._steps}
        # Each of these is a gather on every rank. Only rank 0 writes the file, so only it keeps whole tensors.
        whole = ((name, self._average.whole(name)) for name in self._average.tensors)
        return {"average": {name: value for name, value in whole if self._keeps}, "steps": self._steps}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._average.load(state_dict["average"])  # whole, or in files; cut once the module is what it will be
        self._steps, self._is_loaded = state_dict["steps"], True
        module: Any = self._module and self._module()
        if self._has_begun and module is not None:  # the module is what it will be, and files may be gone at once
            self._place(module.trainer, module)

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._keeps, self._strategy = trainer.is_global_zero, weakref.ref(trainer.strategy)
        self._is_loaded = self._has_begun = False
        if self._module is None or self._module() is not pl_module:
            self._module = weakref.ref(pl_module)
            self._begin_anew()

    def _begin_anew(self) -> None:
        self._average, self._steps = Averages(), 0

    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def _place(self, trainer: Trainer, module: LightningModule) -> None:
        """Bring the average into the form of the parameters: cut it, or move it to their device."""
        if trainer.ckpt_path and not self._is_loaded:
            self._begin_anew()  # other weights were loaded, without an average of theirs
        parameters = _parameters(module)
        found = _mismatches(self._average.tensors, parameters)
        if module.strict_loading:
            refuse(trainer, list(found.values()))
        self._average.place(parameters, leave_out=found)

    # Updates ----------------------------------------------------------------------------------------------------

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._place(trainer, pl_module)
        self._global_step = trainer.global_step
        self._has_batches, self._has_begun = False, True

    @override
    @torch.no_grad()
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        # A parameter that is unfrozen now has had one value up to this step, which is its average.
        if self._average.tensors:
            for name, parameter in _parameters(pl_module).items():
                if parameter.requires_grad and name not in self._average.tensors:
                    self._average.begin(name, parameter)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._has_batches = True
        has_stepped, self._global_step = trainer.global_step != self._global_step, trainer.global_step
        if not has_stepped or has_skipped_batch(trainer):
            return
        self._steps += 1
        if self._steps > self._start_step and self._steps % self._every_n_steps == 0:
            with torch.no_grad():
                self._average.update(_parameters(pl_module), decay=self._decay)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._has_batches and trainer.global_step == 0:
            rank_zero_warn(
                "ExponentialMovingAverage averaged nothing, because trainer.global_step stayed 0: Lightning counts the "
                "steps of self.optimizers(), not those of optimizers taken with use_pl_optimizer=False"
            )

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # The strategy has given the device's memory back; shards stay shards, in host memory.
        self._average.to_host()

    # Evaluation -------------------------------------------------------------------------------------------------

    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def _swap_in(self, trainer: Trainer, pl_module: LightningModule) -> None:
        is_first = trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking
        if is_first and not self._raw.tensors and (self._swaps or not self._average.is_here):
            self._place(trainer, pl_module)
        if not self._swaps or self._raw.tensors:
            return
        parameters = _parameters(pl_module)
        self._average.follow(parameters)
        for name in self._average.tensors:
            self._raw.begin(name, parameters[name])
        self._parts = self._raw.parts_of(parameters)
        self._average.write(self._parts)  # in place: FSDP2 gathers from this memory

    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def _swap_back(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._raw.tensors:
            return
        parameters = _parameters(pl_module)  # what is still gathered are averages
        if self._raw.follow(parameters):
            self._parts = self._raw.parts_of(parameters)
        self._put_back()

    def _put_back(self) -> None:
        self._raw.write(self._parts)
        self._raw, self._parts = Averages(is_wide=False), {}

    on_validation_start = on_test_start = on_predict_start = _swap_in
    on_validation_end = on_test_end = on_predict_end = _swap_back

    @override
    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        # No collective here, where other ranks may not come. Units that a step has left gathered cannot be looked at.
        reshard_units(pl_module)
        self._put_back()


def _violations(decay: float, every_n_steps: int, start_step: int) -> list[str]:
    found = []
    if not 0 <= decay < 1:
        found.append(f"decay={decay} must be at least 0 and less than 1, such as 0.999")
    if every_n_steps < 1:
        found.append(f"every_n_steps={every_n_steps} must be at least 1")
    if start_step < 0:
        found.append(f"start_step={start_step} must not be negative; 0 begins with the first step")
    return found


def _parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters as their shards, tied ones once."""
    reshard_units(module)
    return dict(module.named_parameters())


def _aliases(module: nn.Module) -> dict[str, list[str]]:
    """First name of a parameter -> all its names."""
    found: dict[str, list[str]] = {}
    for name, first in first_names(module).items():
        found.setdefault(first, []).append(name)
    return found


def _mismatches(average: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> dict[str, str]:
    """Name -> why its average cannot be that of a parameter of the module."""
    found = {name: _mismatch(name, value, parameters.get(name)) for name, value in average.items()}
    return {name: message for name, message in found.items() if message is not None}


def _mismatch(name: str, average: Tensor, parameter: Tensor | None) -> str | None:
    if parameter is None:
        return f"the checkpoint averages {name}, which the module lacks; load the module that was averaged"
    if average.shape != parameter.shape:
        return (
            f"the checkpoint averages {name} of shape {tuple(average.shape)}, the module's is "
            f"{tuple(parameter.shape)}; load the module that was averaged"
        )
    return None

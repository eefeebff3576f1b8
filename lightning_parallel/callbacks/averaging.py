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
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn
from typing_extensions import override

from lightning_parallel.callbacks.non_finite import has_skipped_batch
from lightning_parallel.callbacks.strategy_protocol import cuts_batches, refuse
from lightning_parallel.checkpoint.full_state import full_state_dict as whole_model
from lightning_parallel.checkpoint.full_state import whole
from lightning_parallel.errors import check
from lightning_parallel.ranks.dtensors import local_of
from lightning_parallel.techniques.sharding import reshard_units

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class ExponentialMovingAverage(Callback):
    """Average the trainable parameters over the steps (Polyak and Juditsky 1992), and evaluate the average.

    ``average = decay * average + (1 - decay) * weights`` after a step; the first update takes the weights as they are,
    as `torch.optim.swa_utils.AveragedModel` does. A step is a training batch after which ``trainer.global_step`` has
    grown: accumulated microbatches do not count, and under manual optimization the steps of several optimizers in one
    batch count once; steps that `NonFinite` skips do not. Each rank holds the average of its own shards only. That of
    16-bit parameters is in 32 bits, because small changes would be rounded away.

    Training goes on from the raw weights, which are also those of checkpoints; the average is in the callback's own
    state there, whole, and goes on under any strategy and number of ranks. Validation during ``fit`` sees the average
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
        self._average: dict[str, Tensor] = {}  # by name: objects change when a strategy shards the module
        self._raw: list[tuple[Tensor, Tensor]] = []
        self._steps = 0
        self._global_step = 0
        self._has_batches = False
        self._is_loaded = False
        self._keeps = True
        self._module: weakref.ref[nn.Module] | None = None

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
        for name, average in self._average.items():
            value = whole(average)
            for alias in aliases.get(name, ()):
                if alias in weights:
                    weights[alias] = value.to(weights[alias].dtype, copy=True)
        return weights

    # State ------------------------------------------------------------------------------------------------------

    @override
    def state_dict(self) -> dict[str, Any]:
        # Each of these is a gather on every rank. Only rank 0 writes the file, so only it keeps whole tensors.
        average = {}
        for name, shard in self._average.items():
            gathered = whole(shard)
            if self._keeps:
                average[name] = gathered
        return {"average": average, "steps": self._steps}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._average = dict(state_dict["average"])  # whole; cut once the module is what it will be
        self._steps = state_dict["steps"]
        self._is_loaded = True

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if cuts_batches(trainer):
            averages = f"{type(self).__name__} under pipeline > 1, where a rank holds some layers only,"
            refuse(trainer, [f"{averages} is not available in this version; leave one out"])
        self._keeps = trainer.is_global_zero
        self._is_loaded = False
        if self._module is None or self._module() is not pl_module:
            self._module = weakref.ref(pl_module)
            self._average, self._steps = {}, 0

    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def _place(self, trainer: Trainer, module: LightningModule) -> None:
        """Bring the average into the form of the parameters: cut it, or move it to their device."""
        if trainer.ckpt_path and not self._is_loaded:
            self._average, self._steps = {}, 0  # other weights were loaded, without an average of theirs
        parameters = _parameters(module)
        found = _mismatches(self._average, parameters)
        if module.strict_loading:
            refuse(trainer, list(found.values()))
        self._average = {
            name: _in_form_of(parameters[name], average) for name, average in self._average.items() if name not in found
        }

    # Updates ----------------------------------------------------------------------------------------------------

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._place(trainer, pl_module)
        self._global_step = trainer.global_step
        self._has_batches = False

    @override
    @torch.no_grad()
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        # A parameter that is unfrozen now has had one value up to this step, which is its average.
        if self._average:
            for name, parameter in _parameters(pl_module).items():
                if parameter.requires_grad and name not in self._average:
                    self._average[name] = _copied(parameter)

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
            self._update(pl_module)

    @torch.no_grad()
    def _update(self, module: nn.Module) -> None:
        averages, values = list[Tensor](), list[Tensor]()
        for name, parameter in _parameters(module).items():
            average = self._average.get(name)
            if average is None and parameter.requires_grad:
                self._average[name] = _copied(parameter)
            elif average is not None and average.dtype == parameter.dtype:
                averages.append(local_of(average))
                values.append(local_of(parameter))
            elif average is not None:  # one by one: only one tensor is widened at a time
                local_of(average).lerp_(local_of(parameter).to(average.dtype), 1 - self._decay)
        if averages:
            get_ema_multi_avg_fn(self._decay)(averages, values, 0)

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
        self._average = {name: average.cpu() for name, average in self._average.items()}

    # Evaluation -------------------------------------------------------------------------------------------------

    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def _swap_in(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._swaps or self._raw:
            return
        if trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking:
            self._place(trainer, pl_module)
        parameters = _parameters(pl_module)
        for name, average in self._average.items():
            local = local_of(parameters[name]).detach()
            self._raw.append((local, local.clone()))
            local.copy_(local_of(average))  # in place: FSDP2 gathers from this memory

    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def _swap_back(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._raw:
            reshard_units(pl_module)  # what is still gathered are averages
        for local, raw in self._raw:
            local.copy_(raw)
        self._raw = []

    on_validation_start = on_test_start = on_predict_start = _swap_in
    on_validation_end = on_test_end = on_predict_end = _swap_back

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._swap_back(trainer, pl_module)


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
    names: dict[Tensor, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return {aliases[0]: aliases for aliases in names.values()}


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


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.itemsize < 4 else dtype


def _copied(parameter: Tensor) -> Tensor:
    """A new tensor with the values and the placement of `parameter`."""
    return parameter.detach().to(_wide(parameter.dtype), copy=True)


def _in_form_of(parameter: Tensor, average: Tensor) -> Tensor:
    """`average` as `parameter` is: sharded alike, on its device. A collective only if both are sharded otherwise."""
    if _layout(average) != _layout(parameter):
        average = whole(average)
        if isinstance(parameter, DTensor):
            # Without a source rank each rank cuts its own shard out; the copy lets go of the whole tensor.
            on_device = average.to(parameter.device_mesh.device_type)
            mesh, placements = parameter.device_mesh, parameter.placements
            average = distribute_tensor(on_device, mesh, placements, src_data_rank=None).clone()
        else:
            average = average.clone()
    return average.to(parameter.device, _wide(parameter.dtype))


def _layout(tensor: Tensor) -> Any:
    return (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None

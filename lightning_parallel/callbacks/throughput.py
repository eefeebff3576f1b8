"""`Throughput`: samples, tokens, steps and FLOPs a second, and their share of what the devices can do."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_parallel import _lightning
from lightning_parallel.callbacks.batch_geometry import num_samples, num_tokens
from lightning_parallel.callbacks.meter_log import MeterLog
from lightning_parallel.callbacks.meter_windows import Amounts, MeteredRanks, Window
from lightning_parallel.callbacks.peak_flops import peak_flops
from lightning_parallel.callbacks.step_clock import Phases, build_clock
from lightning_parallel.callbacks.step_flops import FlopsOfUnit, StepFlops
from lightning_parallel.errors import ConfigurationError, check

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

Count = Callable[[Any], int]
_TIMED, _BETWEEN = "train", "between epochs"


class Throughput(Callback):
    """Log samples, tokens, steps and FLOPs a second, over all devices and for each (``device/``), MFU and HFU.

    Ranks that share samples (tensor, context and pipeline parallelism) count once. Validation is no training time; the
    first update, and one in which FLOPs are counted, are left out of the rates. ``samples`` and ``tokens`` are those
    since the beginning, also of a run that resumes. Nothing waits for the device: on an accelerator, times are read
    from events when they are over, so values come a little after the step to which they belong.

    FLOPs are counted once, by `torch.utils.flop_counter`, and taken in proportion to tokens, or to samples where a
    batch has none. MFU and HFU are those of PaLM (Chowdhery et al. 2022, appendix B): of the peak, MFU has forward and
    backward of the model, and HFU also what backward computes again. Values go to the loggers, past the metrics of the
    module.

    Args:
        every: Updates between two logs.
        tokens: A function of the batch that returns its number of tokens. By default they are the elements of
            ``input_ids``, or of the first tensor of integers of the shape `[samples, length]`.
        key: In place of it, the key or index of the tensor in the batch whose elements are the tokens.
        flops: Whether FLOPs are counted.
        peak: FLOP/s that one device can do in the dtype of the training. By default as NVIDIA's data sheets of A100,
            H100 and H200 have it; on other devices, MFU and HFU are left out.

    Attributes:
        latest: The values that were logged last, by name.

    Raises:
        ConfigurationError: If arguments do not fit, or `tokens` returns no number.

    Example:
        >>> Trainer(strategy="fsdp_custom", callbacks=[Throughput(every=20, peak=989e12)])
    """

    def __init__(
        self,
        *,
        every: int = 50,
        tokens: Count | None = None,
        key: str | int | None = None,
        flops: bool = True,
        peak: float | None = None,
    ) -> None:
        check(_violations(every, tokens, key, peak))
        self.latest: dict[str, float] = {}
        self._every, self._peak, self._counts_flops = every, peak, flops
        self._tokens, self._key = tokens, key
        self._log = MeterLog("Throughput")
        self._ranks = MeteredRanks(1, 1, 1, None)
        self._start()

    def _start(self) -> None:
        """Forget an earlier fit."""
        self._total, self._pending, self._timed, self._update = Amounts(), Amounts(), Amounts(), Amounts()
        self._is_timed = False
        self._known = FlopsOfUnit()
        self._flops: StepFlops | None = None
        self._closed: list[Window] = []

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._start()

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        device = trainer.strategy.root_device
        self._ranks = MeteredRanks.of(trainer)
        self._device_peak = self._peak
        if self._counts_flops:
            self._flops = StepFlops(trainer)
            self._device_peak = self._peak or self._known_peak(device, str(trainer.precision_plugin.precision))
        self._phases = Phases(build_clock(device))
        self._phases.enter("")

    def _known_peak(self, device: torch.device, precision: str) -> float | None:
        peak = peak_flops(device, precision)
        if peak is None:
            name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
            self._log.say(f"MFU and HFU are left out: the peak of {name} in {precision} is not known; give peak=")
        return peak

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._phases.name == _BETWEEN:
            self._phases.enter(_TIMED)
        samples = num_samples(batch)
        self._microstep = Amounts(samples, self._num_tokens(batch, samples))
        if self._flops is not None:
            self._flops.begin(self._microstep.units)

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if self._flops is not None:
            self._flops.before_update(optimizer)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._flops is not None:
            self._flops.end()
        self._update.add(self._microstep)
        self._pending.add(self._microstep)
        if not _lightning.is_accumulating(trainer):
            self._end_update(trainer)
        self._read(trainer)

    def _end_update(self, trainer: Trainer) -> None:
        self._update.steps = 1
        if self._is_timed:
            self._timed.add(self._update)
        elif self._flops is None or not self._flops.is_due:
            self._is_timed = True
            self._phases.enter(_TIMED)
        self._update = Amounts()
        if self._timed.steps >= self._every:
            self._close(trainer)

    def _close(self, trainer: Trainer) -> None:
        """End a window. A collective of hosts, which waits for no device."""
        flops = [] if self._flops is None else self._flops.sums()
        sums = self._ranks.summed([*self._pending.numbers, *self._timed.numbers, *flops])
        self._total.add(Amounts(sums[0], sums[1]))
        timed = Amounts(sums[2], sums[3], self._timed.steps)
        if self._flops is not None:
            self._known = self._flops.of_unit(sums[4:]).or_else(self._known)
            for sentence in self._flops.left_out(self._known):
                self._log.say(sentence)
        total = Amounts(*self._total.numbers)
        phases = self._phases.cut(without=_BETWEEN)
        self._closed.append(Window(phases, timed, total, self._known, _lightning.logs.logged_step(trainer)))
        self._pending, self._timed = Amounts(), Amounts()

    def _read(self, trainer: Trainer, *, waits: bool = False) -> None:
        """Log the windows that are over on the device."""
        while self._closed and (waits or self._closed[0].phases.is_over()):
            window = self._closed.pop(0)
            self.latest = window.values(self._ranks.num_devices, self._device_peak, waits=waits)
            self._log.write(trainer, self.latest, window.at)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self._before_validation = self._phases.name
            self._phases.enter("")

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self._phases.enter(self._before_validation)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._phases.name == _TIMED:
            self._phases.enter(_BETWEEN)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._pending.samples or self._timed.steps:
            self._close(trainer)
        self._read(trainer, waits=True)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._flops is not None:
            self._flops.close()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._flops is not None:
            self._flops.close()
            self._flops = None

    @override
    def state_dict(self) -> dict[str, Any]:
        # No collective, so of what other ranks have read since the last log this rank's is taken.
        pending = [number * self._ranks.num_readers for number in self._pending.numbers]
        total = [number + more for number, more in zip(self._total.numbers, pending, strict=True)]
        return {"total": total, "flops": (self._known.model, self._known.hardware)}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._total = Amounts(*state_dict["total"])
        self._known = FlopsOfUnit(*state_dict["flops"])

    def _num_tokens(self, batch: Any, samples: float) -> float:
        if self._tokens is not None:
            return _as_number(self._tokens(batch))
        if self._key is None:
            found = num_tokens(batch, int(samples)) if samples == samples else None
            return float("nan") if found is None else found
        try:
            return int(batch[self._key].numel())
        except (KeyError, IndexError, TypeError, AttributeError):
            raise ConfigurationError(
                [f"Throughput(key={self._key!r}): the batch is a {type(batch).__name__} without it; give another key"]
            ) from None


def _violations(every: int, tokens: Count | None, key: str | int | None, peak: float | None) -> list[str]:
    found = []
    if every < 1:
        found.append(f"Throughput(every={every}) is no number of updates; give 1 or more")
    if tokens is not None and key is not None:
        found.append(f"Throughput has both tokens and key={key!r}; give one of the two")
    if peak is not None and peak <= 0:
        found.append(f"Throughput(peak={peak}) is no number of FLOP/s; give that of one device, such as 989e12")
    return found


def _as_number(value: Any) -> float:
    is_number = isinstance(value, int | float) or (
        isinstance(value, Tensor) and value.numel() == 1 and value.device.type == "cpu"
    )
    if not is_number:
        where = f" on {value.device}, for which each step would wait" if isinstance(value, Tensor) else ""
        raise ConfigurationError(
            [f"Throughput(tokens=...) returned a {type(value).__name__}{where}; return an int, as from shapes"]
        )
    return float(value)

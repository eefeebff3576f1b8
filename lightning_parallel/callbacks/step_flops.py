"""FLOPs of one step: where they are counted, and what they say of other steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch
from torch.optim import Optimizer

from lightning_parallel import _torch
from lightning_parallel.callbacks.batch_geometry import num_readers
from lightning_parallel.callbacks.strategy_protocol import (
    PlannedSteps,
    recompute_of,
    replica_devices,
    splits_layers,
)

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

_COUNTED = 2
"""The microstep whose real operations are counted: in the first one, strategies run the module more than once."""


@dataclass
class Counted:
    """FLOPs of steps, and the tokens or samples of these steps.

    Args:
        model: FLOPs of forward and backward.
        again: Those that backward computes again.
        units: Tokens, or samples where batches have no tokens.
    """

    model: float = 0.0
    again: float = 0.0
    units: float = 0.0

    def add(self, count: _torch.flops.FlopCount, units: float) -> None:
        """Add what was counted in a step of `units`."""
        self.model += count.model
        self.again += count.again
        self.units += units


@dataclass(frozen=True)
class FlopsOfUnit:
    """FLOPs for each token, or each sample where batches have no tokens.

    Args:
        model: Of forward and backward; ``None`` if they are not known.
        hardware: With those that are computed again; ``None`` if they are not known.
    """

    model: float | None = None
    hardware: float | None = None

    def or_else(self, known: FlopsOfUnit) -> FlopsOfUnit:
        """These, or those that a run knew from which this one goes on."""
        return known if self.model is None else self


class StepFlops:
    """Counts the FLOPs of a step once: on a plain copy, where the first step is compared with one, or in a real step.

    On a plain copy they are those of the model, whatever ranks share. In a real step they are those of a rank, and
    their sum over ranks is that of the model unless ranks that split layers compute the rest of the model alike.

    Args:
        trainer: The trainer, at the start of training.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._recompute = recompute_of(trainer)
        self._is_split = splits_layers(trainer)
        self._num_sharing = max(1, trainer.world_size // num_readers(trainer))
        self._is_in_threads = len(replica_devices(trainer)) > 1
        self._plain, self._real = Counted(), Counted()
        self._units, self._number = 0.0, 0
        self._count: _torch.flops.FlopCount | None = None
        self._open = ExitStack()
        self.unknown: set[str] = set()
        """Names of operations of this rank that were not counted."""
        strategy = trainer.strategy
        # Under manual optimization the copy's step ends where it would update.
        is_followed = isinstance(strategy, PlannedSteps) and trainer.lightning_module.automatic_optimization
        self._compared = strategy.first_step if is_followed else None  # type: ignore[attr-defined]
        if self._compared is not None:
            self._compared.around_plain = self._of_plain

    @property
    def is_due(self) -> bool:
        """Whether operations of a microstep that comes are going to be counted."""
        return self._number < _COUNTED and (self._plain.units == 0 or self._recompute.kind != "none")

    def begin(self, units: float) -> None:
        """Call it before a microstep.

        Args:
            units: Its tokens or samples, of this rank.
        """
        is_due, self._units = self.is_due, units
        self._number += 1
        if is_due and self._number == _COUNTED:
            self._count = _torch.flops.FlopCount()
            # Operations inside of compiled code are not seen.
            self._open.enter_context(torch.compiler.set_stance("force_eager"))
            self._open.enter_context(self._count)

    def before_update(self, optimizer: Optimizer) -> None:
        """Leave the update out, until `optimizer` has stepped."""
        count = self._count
        if count is None:
            return

        def go_on(*_: object) -> None:
            count.is_paused = False

        count.is_paused = True
        self._open.enter_context(_removed(optimizer.register_step_post_hook(go_on)))

    def end(self) -> None:
        """Call it after a microstep, or after an error."""
        if self._count is not None:
            self._open.close()
            self._real.add(self._count, self._units)
            self.unknown |= self._count.unknown
            self._count = None

    def close(self) -> None:
        """Look at no further steps."""
        self._open.close()
        self._count = None
        if self._compared is not None:
            self._compared.around_plain = nullcontext

    @contextmanager
    def _of_plain(self) -> Iterator[None]:
        with _torch.flops.FlopCount() as count:
            yield
        self._plain.add(count, self._units)
        self.unknown |= count.unknown

    def sums(self) -> list[float]:
        """Numbers that are to be added up over ranks, for `of_unit`."""
        return [getattr(each, field.name) for each in (self._plain, self._real) for field in fields(each)]

    def of_unit(self, sums: list[float]) -> FlopsOfUnit:
        """The FLOPs for each token or sample, as far as they are known.

        Args:
            sums: Those of :meth:`sums` over all ranks, divided by the number of ranks that share each sample.
        """
        plain, real = Counted(*sums[:3]), Counted(*sums[3:])
        sees_all = not self._is_in_threads
        model = again = None
        if plain.units:
            model, again = plain.model / plain.units, plain.again / plain.units
        elif real.units and sees_all and not self._is_split:
            model = self._num_sharing * real.model / real.units
        if real.units and sees_all:
            again = self._num_sharing * real.again / real.units
        if model is None or again is None or self._recompute.kind == "budget":
            return FlopsOfUnit(model)
        return FlopsOfUnit(model, model + again)

    def left_out(self, known: FlopsOfUnit) -> list[str]:
        """Sentences that say which FLOPs are left out and why, once a step was counted.

        Args:
            known: The FLOPs that are known.
        """
        found: list[str] = []
        if self._number < _COUNTED:
            return found
        if known.model is None:
            where = "ranks that split layers" if self._is_split else "threads of one process"
            found.append(
                f"FLOPs are left out: with {where} they are counted on a plain copy of the module, in the proof of "
                "the first step, and there was none"
            )
        elif known.hardware is None:
            found.append("HFU is left out: what the compiler or threads compute again is not counted")
        if self.unknown:
            names = ", ".join(sorted(self.unknown))
            found.append(f"FLOPs are too few: torch has no formula for {names}, which count as none")
        return found


@contextmanager
def _removed(handle: torch.utils.hooks.RemovableHandle) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()

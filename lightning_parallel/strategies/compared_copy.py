"""The copy with which a first step is compared: what it shares with the module, and what makes it ready."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch.distributed as dist
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.strategies import ParallelStrategy
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, Dataset, Sampler

from lightning_parallel import _lightning
from lightning_parallel.checkpoint.full_state import whole
from lightning_parallel.module.differences import Tolerance
from lightning_parallel.module.plain_copy import NotCopyableError, PlainCopy
from lightning_parallel.module.short_stacks import ShortStacks
from lightning_parallel.ranks.objects import of_all_ranks
from lightning_parallel.ranks.stage_owners import all_stage_owners
from lightning_parallel.strategies.compared_strategy import ComparedStrategy, shortened, tolerance_of, unsupported
from lightning_parallel.strategies.compared_window import ComparedWindow
from lightning_parallel.strategies.manual_window import ManualWindow
from lightning_parallel.strategies.module_device import set_module_device
from lightning_parallel.strategies.plain_step import PlainSteps
from lightning_parallel.strategies.window_gradients import clearing_noted

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

_SHARED = (DeviceMesh, dist.ProcessGroup, Dataset, DataLoader, Sampler, LightningDataModule)
_TABLES = ("datasets", "pandas", "polars", "pyarrow")
"""Libraries whose objects are data: copies of them could fill the memory of the host."""
_LARGE = 1 << 24
"""Bytes from which on an array is data, and no state of a step."""


@dataclass(frozen=True)
class ComparedCopy:
    """A plain copy of the module, and the layers that both do without while they are compared.

    Args:
        strategy: The strategy.
        plain: The copy.
        short: The layers; ``None`` where the module fits beside itself.
    """

    strategy: ComparedStrategy
    plain: PlainCopy
    short: ShortStacks | None
    listening: ExitStack = field(default_factory=ExitStack)

    def close(self) -> None:
        """Listen no more to optimizers."""
        self.listening.close()

    def follow(self, args: Sequence[Any], kwargs: dict[str, Any], *, numbers_only: bool = False) -> str:
        """Give the copy what the module has now. No collective.

        Args:
            args: The arguments of the step.
            kwargs: As `args`.
            numbers_only: As of `PlainCopy.follow`.

        Returns:
            The reason for which it cannot follow the module into the step; empty if it can.
        """
        if any(isinstance(each, Iterator) for each in (*args, *kwargs.values())):
            return "the step takes an iterator, which gives each batch once"
        if getattr(self.strategy.steps, "microbatch_weights", None) is not None:
            return "TokenWeighted weights the losses of microbatches, and not what the step logs of them"
        try:
            self.plain.follow(self.strategy.module, numbers_only=numbers_only)
        except NotCopyableError as error:
            return str(error)
        return ""

    def note_step(self) -> None:
        """Note what the module has behind a step, where another one of the same window may follow."""
        module = self.strategy.module
        self.plain.note(module)
        if module.trainer.accumulate_grad_batches > 1 or not module.automatic_optimization:
            self.plain.note_values(module)

    def follow_values(self) -> bool:
        """Give the copy the tensors that hooks have written since the last step of the window. A collective.

        Returns:
            That it has them.
        """
        changed = of_all_ranks(self.plain.changed(self.strategy.module))
        if names := {name for each in changed for name in each}:
            self._fill(names)
        return True

    @contextmanager
    def shortened(self) -> Iterator[None]:
        """Inside this context, the module and its copy have fewer layers."""
        assert self.short is not None
        with self.short.applied(self.strategy.module), self.short.applied(self.plain.module):
            yield

    def open_window(self, *, finest: float) -> ComparedWindow:
        """Fill the copy, and begin the window in which it is compared. A collective.

        Args:
            finest: The least precision to expect.
        """
        strategy, module = self.strategy, self.strategy.module
        steps = self.steps()
        tolerance = Tolerance(max(tolerance_of(strategy).precision, finest))
        if not module.automatic_optimization:
            return ManualWindow(steps, tolerance)
        layers, num_processes = str(self.short or ""), strategy.num_processes
        window = ComparedWindow(steps, tolerance, layers=layers, num_processes=num_processes)
        for optimizer in strategy.optimizers:
            self.listening.enter_context(clearing_noted(optimizer, window.gradients.clear))
        return window

    def steps(self) -> PlainSteps:
        """The steps of the copy, filled with what the module has now. A collective."""
        strategy, module = self.strategy, self.strategy.module
        plain = self._fill()
        _make_ready(plain, strategy)
        return PlainSteps(module, plain, module.trainer, strategy.root_device, data_group(strategy))

    def _fill(self, names: Collection[str] | None = None) -> LightningModule:
        owners = all_stage_owners(self.strategy.module)
        plain = self.plain.fill(self.strategy.module, lambda name, tensor: whole(tensor, owners.get(name)), names)
        assert isinstance(plain, LightningModule)
        return plain


def copy_of(strategy: ComparedStrategy, trainer: Trainer, *, may_leave_out: bool) -> tuple[ComparedCopy | None, str]:
    """A copy of the module, before anything is applied to it. A collective.

    Args:
        strategy: The strategy.
        trainer: The trainer.
        may_leave_out: Whether it has fewer layers, or is not made, where it does not fit beside the module.

    Returns:
        The copy, and the reason for which there is none; empty if there is one.
    """
    reason, short = unsupported(strategy), None
    if not reason and may_leave_out:
        short, reason = shortened(strategy)
    if reason:
        return None, reason
    shared = [trainer, strategy, *_shared_with(strategy.module)]
    try:
        plain = PlainCopy(strategy.module, shared=shared, device=strategy.root_device)
    except NotCopyableError as error:
        return None, str(error)
    return ComparedCopy(strategy, plain, short), ""


def data_group(strategy: ComparedStrategy) -> dist.ProcessGroup | None:
    """The ranks that read different samples; ``None`` for one process."""
    return getattr(strategy, "data_group", None)


def _make_ready(plain: LightningModule, strategy: ComparedStrategy) -> None:
    """Do to a plain copy what one process would do to the module, too."""
    set_module_device(plain, strategy.root_device)
    strategy.precision_plugin.convert_module(plain)
    if isinstance(strategy, ParallelStrategy) and (sync := _lightning.layer_sync(strategy)) is not None:
        sync.apply(plain)


def _shared_with(module: LightningModule) -> list[object]:
    """Objects that a copy of `module` shares with it: data, and process groups and meshes, which have no copies."""
    found: list[object] = [m.process_group for m in module.modules() if getattr(m, "process_group", None) is not None]
    for value in chain.from_iterable(vars(child).values() for child in module.modules()):
        entries = value.values() if type(value) is dict else value if type(value) in (list, tuple) else (value,)
        found += [entry for entry in entries if isinstance(entry, _SHARED) or _is_data(entry)]
    return found


def _is_data(value: object) -> bool:
    if isinstance(value, np.ndarray):
        return value.nbytes > _LARGE
    return type(value).__module__.partition(".")[0] in _TABLES

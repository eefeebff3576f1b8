"""The proof with which a fit begins: its first step equals that of one process on a plain copy of the module.

The copy is taken before the module is made parallel. It is given the same batch, from the same random state, and its
gradients are averaged over the ranks that read different samples. Then the real step has to return the same loss, log
the same values, leave metrics in the same states and end with the same gradients, before anything is updated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch.distributed as dist
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, Dataset, Sampler

from lightning_parallel import _lightning
from lightning_parallel.checkpoint.full_state import whole
from lightning_parallel.errors import FirstStepError
from lightning_parallel.errors import check as refuse
from lightning_parallel.module.differences import Tolerance
from lightning_parallel.module.plain_copy import NotCopyableError, PlainCopy
from lightning_parallel.ranks.random_streams import RandomState
from lightning_parallel.ranks.stage_owners import all_stage_owners
from lightning_parallel.strategies.compared_strategy import (
    ComparedStrategy,
    in_words,
    is_reference,
    layers_with_parts,
    of_all_ranks,
    shares_samples,
    tolerance_of,
    unsupported,
)
from lightning_parallel.strategies.compared_window import ComparedWindow
from lightning_parallel.strategies.manual_window import ManualWindow
from lightning_parallel.strategies.module_device import set_module_device
from lightning_parallel.strategies.plain_step import PlainSteps, StepValues
from lightning_parallel.strategies.second_run import SecondRun

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

CHECKS = ("auto", "first_step", "off")
"""Values of the argument `check`."""

_SHARED = (DeviceMesh, dist.ProcessGroup, Dataset, DataLoader, Sampler, LightningDataModule)
_TABLES = ("datasets", "pandas", "polars", "pyarrow")
"""Libraries whose objects are data: copies of them could fill the memory of the host."""
_LARGE = 1 << 24
"""Bytes from which on an array is data, and no state of a step."""
_DRAWN = "it draws random numbers (dropout), which ranks that share samples draw for their parts, and differs"


def check_violations(check: str) -> list[str]:
    """Reasons why `check` is no value of that argument; empty if it is one."""
    if check in CHECKS:
        return []
    return [f"check={check!r} is none of {', '.join(map(repr, CHECKS))}"]


class FirstStep:
    """Compares the first accumulation window of a fit with one process; later steps pass by it.

    Args:
        strategy: The strategy.
        check: ``"first_step"``; ``"auto"``, where the module fits beside itself; ``"off"``.
    """

    def __init__(self, strategy: ComparedStrategy, check: str) -> None:
        refuse(check_violations(check))
        self._strategy = strategy
        self._check = check
        self._copy: PlainCopy | None = None
        self._window: ComparedWindow | None = None
        self._layers: tuple[str, ...] = ()
        self._listening = ExitStack()
        self.is_paused = False
        """Whether steps are trials, which are undone, and in which memory is measured."""
        self.outcome = ""
        """The result in words; empty where nothing has been said."""
        self.finest = 0.0
        """The least precision to expect: a module may compute in a coarser dtype than it has."""

    def begin(self, trainer: Trainer) -> None:
        """Copy the module, if it is to be compared. Call it before anything is applied to it."""
        self.end()
        strategy, module = self._strategy, self._strategy.module
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        if self._check == "off" or not is_fitting or is_reference(strategy) or trainer.ckpt_path is not None:
            return
        reason = unsupported(strategy, is_asked_for=self._check == "first_step")
        if not reason:
            shared = [trainer, strategy, *_shared_with(module)]
            try:
                self._copy = PlainCopy(module, shared=shared, device=strategy.root_device)
            except NotCopyableError as error:
                reason = str(error)
        if self._agree(reason):
            self._layers = layers_with_parts(strategy)

    def _agree(self, reason: str) -> bool:
        """Whether no rank has a `reason` not to compare; else none does, as comparing is a collective. One itself."""
        if self._strategy.reduce_boolean_decision(not reason):
            return True
        self._leave(reason or "another rank cannot")
        return False

    def note(self) -> None:
        """Note the module as the strategy has made it: what changes from here on, the user's hooks change."""
        if self._copy is not None:
            self._copy.note(self._strategy.module)

    def end(self) -> None:
        """Free the copy."""
        self._listening.close()
        self._copy = self._window = None

    def run(self, step: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run a training step, and compare it if it belongs to the first window. A collective then.

        Args:
            step: Runs the training step of the parallel module.
            args: Its arguments.
            kwargs: As `args`.

        Raises:
            FirstStepError: If its loss, or what it logs or gives to metrics, is not that of one process.
        """
        if self._copy is None or self.is_paused or not self._is_compared(args, kwargs):
            return step(*args, **kwargs)
        assert self._window is not None
        window, strategy, values = self._window, self._strategy, StepValues()
        window.ours, window.state = values, RandomState.take(strategy.root_device)
        with values.of(strategy.module, passes_on=True):
            output = step(*args, **kwargs)
        values.take_loss(output)
        values.take_metrics(strategy.module)
        if isinstance(window, ManualWindow):
            self._end_manual(window)
            return output
        again = SecondRun(step=step, args=args, kwargs=kwargs, window=window, strategy=strategy, layers=self._layers)
        self._decide(window.value_differences(values), again)
        return output

    def _end_manual(self, window: ManualWindow) -> None:
        """Compare the rest of a step that has updated nothing; one that updates has been compared before. A collective.

        Raises:
            FirstStepError: If its values are not those of one process.
        """
        if self._window is not window:
            return
        # All ranks alike: one that has seen an update would be here no more.
        if not self._strategy.reduce_boolean_decision(not window.has_missed_update):
            self._leave("the step updates through optimizers that Lightning has not wrapped")
            return
        self._decide(window.steady_differences())

    def _leave(self, reason: str) -> None:
        self.end()
        self._tell(f"first step not compared with one process: {reason}")

    def _tell(self, outcome: str) -> None:
        self.outcome = outcome
        rank_zero_info(outcome)

    def held(self) -> AbstractContextManager[None]:
        """Return a context in which gradients are left as they are on each rank."""
        return nullcontext() if self._window is None else self._window.held()

    def _is_compared(self, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Run the step on the copy. False if some rank could not. A collective."""
        assert self._copy is not None
        # Before the collectives of `fill`.
        if self._window is None and not self._agree(_not_followed(self._copy, self._strategy, args, kwargs)):
            return False
        reason = ""
        try:
            if self._window is None:
                self._window = self._open_window(self._copy)
            self._window.take_plain_step(args, kwargs)
        except Exception as error:  # a user's step may raise anything: the real one will, too, or the copy is at fault
            reason = f"a plain copy of the module raised {type(error).__name__}: {error}"
        return self._agree(reason)

    def _open_window(self, copy: PlainCopy) -> ComparedWindow:
        strategy, module = self._strategy, self._strategy.module
        owners = all_stage_owners(module)
        plain = copy.fill(module, lambda name, tensor: whole(tensor, owners.get(name)))
        assert isinstance(plain, LightningModule)
        _make_ready(plain, strategy)
        steps = PlainSteps(module, plain, module.trainer, strategy.root_device, _data_group(strategy))
        window = ComparedWindow if module.automatic_optimization else ManualWindow
        return window(steps, Tolerance(max(tolerance_of(strategy).precision, self.finest)))

    def before_backward(self, loss: Tensor) -> None:
        """Watch by what the gradient of `loss` is multiplied: by the loss scale, or by weights of a callback."""
        if self._window is not None and not self.is_paused:
            self._window.watch(loss)
            self._listening.enter_context(self._window.of_hooks(self._strategy.module))

    def after_backward(self) -> None:
        """Add the gradients of the copy to those of the window. A collective if hooks see them."""
        self._listening.close()
        if self._window is not None:
            self._window.add_gradients(_data_group(self._strategy))

    def before_update(self) -> None:
        """Compare the gradients of the window, and metrics over the ranks. A collective.

        Raises:
            FirstStepError: If they are not those of one process.
        """
        window = self._window
        if window is None or self.is_paused or (window.num_backwards == 0 and not isinstance(window, ManualWindow)):
            return
        if window.num_backwards == 0:
            self._leave("the step calls backward by itself, and not manual_backward")
            return
        found = window.update_differences(_data_group(self._strategy))
        if not self._agree(window.plain.failure):
            return
        self._decide(found)
        if self._window is None:
            return
        self._tell(window.summary())
        self.end()

    def _decide(self, differences: list[str], again: SecondRun | None = None) -> None:
        """Go on if no rank has found a difference. A collective.

        Args:
            differences: Those of this rank.
            again: The step, to see where it begins to differ.

        Raises:
            FirstStepError: In words on rank 0, which may not be the rank that has found it.
        """
        strategy, window = self._strategy, self._window
        assert window is not None
        found, hint = of_all_ranks(differences), ""
        if not any(found):
            return
        strategy.steps.check_calls()
        # Ranks that read different samples may differ in that, too.
        if any(of_all_ranks(shares_samples(strategy) and window.plain.draws)):
            self._leave(_DRAWN)
            return
        if again is not None:
            found, hint = again.repeated_differences()
            if not any(found):
                return
        self.end()
        rank, first = next((rank, each) for rank, each in enumerate(found) if each)
        where = hint or _where(again, first)
        if strategy.global_rank != 0:
            raise FirstStepError("the first step differs from one process; rank 0 says how")
        raise FirstStepError(in_words(strategy, first, rank, where))


def _data_group(strategy: ComparedStrategy) -> dist.ProcessGroup | None:
    return getattr(strategy, "data_group", None)


def _not_followed(copy: PlainCopy, strategy: ComparedStrategy, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    """The reason for which `copy` cannot follow the module into a step with these arguments; empty if it does."""
    if any(isinstance(each, Iterator) for each in (*args, *kwargs.values())):
        return "the step takes an iterator, which gives each batch once"
    if getattr(strategy.steps, "microbatch_weights", None) is not None:
        return "TokenWeighted weights the losses of microbatches, and not what the step logs of them"
    try:
        copy.follow(strategy.module)
    except NotCopyableError as error:
        return str(error)
    return ""


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


def _where(again: SecondRun | None, differences: Sequence[str]) -> str:
    """The module from which on a step differs, in words; empty where nobody knows. A collective."""
    if again is None:
        return ""
    # First of all: should the second run fail, or never end, this has been said.
    rank_zero_info(f"first step differs from one process: {'; '.join(differences)}. It runs once more, to see where")
    try:
        return again.first_difference()
    except Exception:  # where others wait for this rank, its own error, which comes now, ends them
        return ""

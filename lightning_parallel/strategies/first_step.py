"""The proof with which a fit begins: its first step equals that of one process on a plain copy of the module.

The copy is taken before the module is made parallel. It is given the same batch, from the same random state, and its
gradients are averaged over the ranks that read different samples. Then the real step has to return the same loss, log
the same values and end with the same gradients, before anything is updated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_parallel import _lightning
from lightning_parallel.checkpoint.full_state import whole
from lightning_parallel.errors import FirstStepError
from lightning_parallel.errors import check as refuse
from lightning_parallel.module.differences import Tolerance
from lightning_parallel.module.plain_copy import NotCopyableError, PlainCopy
from lightning_parallel.policies import Policies
from lightning_parallel.ranks.degrees import Degrees
from lightning_parallel.ranks.memory import free_memory
from lightning_parallel.ranks.stage_owners import all_stage_owners, stage_owners_of
from lightning_parallel.strategies.compared_window import ComparedWindow
from lightning_parallel.strategies.module_device import set_module_device
from lightning_parallel.strategies.plain_step import PlainSteps, StepValues

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

_COPIES = 3
"""Number of times that parameters are held for the comparison: the copy, its gradients, and those of one microstep."""
_TF32 = 2.0**-10
CHECKS = ("auto", "first_step", "off")
"""Values of the argument `check`."""


def check_violations(check: str) -> list[str]:
    """Reasons why `check` is no value of that argument; empty if it is one."""
    if check in CHECKS:
        return []
    return [f"check={check!r} is none of {', '.join(map(repr, CHECKS))}"]


class ComparedStrategy(Protocol):
    """A strategy of this package, as far as the comparison reads it."""

    precision_plugin: Any

    @property
    def module(self) -> LightningModule:
        """The user's module."""

    @property
    def degrees(self) -> Degrees:
        """The resolved degrees."""

    @property
    def root_device(self) -> torch.device:
        """This rank's device."""

    @property
    def replica_devices(self) -> list[torch.device]:
        """The devices of this process."""

    @property
    def num_processes(self) -> int:
        """Processes on this machine."""

    @property
    def world_size(self) -> int:
        """The number of ranks."""

    @property
    def global_rank(self) -> int:
        """This rank."""

    @property
    def updates_in_backward(self) -> bool:
        """Whether parameters are updated while backward runs."""

    def policies_for(self, module: LightningModule) -> Policies:
        """The rules, with those that depend on `module`."""

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks, or any, have decided so. A collective."""


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
        self._listening = ExitStack()
        self.is_paused = False
        """Whether steps are trials, which are undone, and in which memory is measured."""

    def begin(self, trainer: Trainer) -> None:
        """Copy the module, if it is to be compared. Call it before anything is applied to it."""
        self.end()
        strategy, module = self._strategy, self._strategy.module
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        if self._check == "off" or not is_fitting or _is_reference(strategy) or trainer.ckpt_path is not None:
            return
        reason = self._unsupported(module)
        if not reason:
            shared = [trainer, strategy, *_groups_of(module)]
            try:
                self._copy = PlainCopy(module, shared=shared, device=strategy.root_device)
            except NotCopyableError as error:
                reason = str(error)
        self._agree(reason)

    def _agree(self, reason: str) -> bool:
        """Whether no rank has a `reason` not to compare; else none does, as comparing is a collective. One itself."""
        if self._strategy.reduce_boolean_decision(not reason):
            return True
        self.end()
        _tell_unchecked(reason or "another rank cannot")
        return False

    def _unsupported(self, module: LightningModule) -> str:
        if not module.automatic_optimization:
            return "manual optimization updates inside of the step"
        if self._strategy.updates_in_backward:
            return "optimizer_in_backward=True uses up each gradient as soon as it is there"
        if self._check == "auto" and not self._fits(module):
            return "the module does not fit on a rank beside itself; check='first_step' tries nevertheless"
        return ""

    def _fits(self, module: LightningModule) -> bool:
        size = sum(parameter.numel() * parameter.itemsize for parameter in module.parameters())
        device = self._strategy.root_device
        sharers = self._strategy.num_processes if device.type == "cpu" else 1
        return _COPIES * size <= free_memory(device) // max(1, sharers) // 2

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
            FirstStepError: If its loss or what it logs is not that of one process.
        """
        if self._copy is None or self.is_paused or not self._is_compared(args, kwargs):
            return step(*args, **kwargs)
        assert self._window is not None
        window = self._window
        values = StepValues()
        with values.of(self._strategy.module, passes_on=True):
            output = step(*args, **kwargs)
        values.take_loss(output)
        self._decide(window.value_differences(values))
        return output

    def _is_compared(self, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Run the step on the copy. False if some rank could not. A collective."""
        assert self._copy is not None
        if self._window is None:
            reason = ""
            try:
                if any(isinstance(each, Iterator) for each in (*args, *kwargs.values())):
                    raise NotCopyableError("the step takes an iterator, which gives each batch once")
                self._copy.follow(self._strategy.module)
            except NotCopyableError as error:
                reason = str(error)
            if not self._agree(reason):  # before the collectives of `fill`
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
        steps = PlainSteps(module, plain, module.trainer, strategy.root_device)
        return ComparedWindow(steps, tolerance_of(strategy))

    def before_backward(self, loss: Tensor) -> None:
        """Watch by what the gradient of `loss` is multiplied: by the loss scale, or by weights of a callback."""
        if self._window is not None and not self.is_paused:
            self._window.watch(loss)
            self._listening.enter_context(self._window.of_hooks(self._strategy.module))

    def after_backward(self) -> None:
        """Add the gradients of the copy to those of the window."""
        self._listening.close()
        if self._window is not None:
            self._window.add_gradients(self._strategy.module.trainer.accumulate_grad_batches)

    def before_update(self) -> None:
        """Compare the gradients of the window. A collective.

        Raises:
            FirstStepError: If they are not those of one process.
        """
        window = self._window
        if window is None or window.num_backwards == 0:
            return
        group = getattr(self._strategy, "data_group", None)
        expected = window.averaged(group)
        ours = {name: _whole_gradient(p) for name, p in self._strategy.module.named_parameters() if name in expected}
        self._decide([*window.hook_differences(), *window.gradient_differences(ours, expected)])
        if self._window is None:
            return
        rank_zero_info(window.summary(len(expected)))
        self.end()

    def _decide(self, differences: list[str]) -> None:
        """Go on if no rank has found a difference. A collective.

        Raises:
            FirstStepError: In words on rank 0, which may not be the rank that has found it.
        """
        strategy, window = self._strategy, self._window
        assert window is not None
        # Together with whether numbers were drawn: ranks that read different samples may differ in that, too.
        found = [(differences, window.plain.draws)]
        if dist.is_initialized() and strategy.world_size > 1:
            found *= strategy.world_size
            dist.all_gather_object(found, found[0])
        if not any(each for each, _ in found):
            return
        self.end()
        if _shares_samples(strategy) and any(draws for _, draws in found):
            _tell_unchecked(
                "it draws random numbers (dropout), which ranks that share samples draw for their parts, and differs"
            )
            return
        rank, first = next((rank, each) for rank, (each, _) in enumerate(found) if each)
        if strategy.global_rank != 0:
            raise FirstStepError("the first step differs from one process; rank 0 says how")
        raise FirstStepError(_in_words(strategy, first, rank))


def tolerance_of(strategy: ComparedStrategy) -> Tolerance:
    """The distance that a step under `strategy` may have from one process: what the coarsest dtype in it allows."""
    policies = strategy.policies_for(strategy.module)
    if policies.layer.float8 not in (None, "none"):
        return Tolerance(torch.finfo(torch.float8_e4m3fn).eps)
    dtypes = {parameter.dtype for parameter in strategy.module.parameters() if parameter.is_floating_point()}
    sharding = policies.sharding_dtypes.fsdp
    dtypes |= {dtype for dtype in (sharding.param_dtype, sharding.reduce_dtype) if dtype is not None}
    name = str(strategy.precision_plugin.precision)
    if name.endswith("-mixed"):
        dtypes.add(torch.bfloat16 if name.startswith("bf16") else torch.float16)
    eps = max(torch.finfo(dtype).eps for dtype in dtypes)
    is_tf32 = strategy.root_device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"
    return Tolerance(max(eps, _TF32) if is_tf32 else eps)


def _is_reference(strategy: ComparedStrategy) -> bool:
    """Whether nothing is done to the module, so that the step is that of one process by itself."""
    is_one = strategy.world_size == 1 and len(strategy.replica_devices) == 1
    return is_one and not strategy.policies_for(strategy.module).layer.are_on


def _shares_samples(strategy: ComparedStrategy) -> bool:
    """Whether several ranks compute the same samples together."""
    degrees = strategy.degrees
    return any(degree != 1 for degree in (degrees.context, degrees.tensor, degrees.pipeline))


def _make_ready(plain: LightningModule, strategy: ComparedStrategy) -> None:
    """Do to a plain copy what one process would do to the module, too."""
    set_module_device(plain, strategy.root_device)
    strategy.precision_plugin.convert_module(plain)
    if isinstance(strategy, ParallelStrategy) and (sync := _lightning.layer_sync(strategy)) is not None:
        sync.apply(plain)


def _groups_of(module: LightningModule) -> list[object]:
    """Process groups and meshes, of which there are no copies."""
    found = [value for value in vars(module).values() if isinstance(value, DeviceMesh | dist.ProcessGroup)]
    return [*found, *(m.process_group for m in module.modules() if getattr(m, "process_group", None) is not None)]


def _whole_gradient(parameter: Tensor) -> Tensor:
    """The whole gradient, on every rank; zeros where there is none. A collective."""
    gradient = parameter.grad
    owners = stage_owners_of(parameter)
    if gradient is None:
        local = torch.zeros_like(parameter)
        return whole(local, owners)
    return whole(gradient, owners)


def _tell_unchecked(reason: str) -> None:
    rank_zero_info(f"first step not compared with one process: {reason}")


def _in_words(strategy: ComparedStrategy, differences: Sequence[str], rank: int) -> str:
    degrees = (f"{each.name}={getattr(strategy.degrees, each.name)}" for each in fields(strategy.degrees))
    given = ", ".join(each for each in degrees if not each.endswith("=1"))
    where = "" if rank == 0 else f", as rank {rank} found"
    return (
        f"the first step under {type(strategy).__name__}({given}) is not that of one process{where}: "
        f"{'; '.join(differences)}. Nothing was updated. The step does something that this strategy does not see "
        "through, or the strategy is wrong: please report it then. Give another strategy, change that part of the "
        "step, or give check='off' to train with other numbers than one process"
    )

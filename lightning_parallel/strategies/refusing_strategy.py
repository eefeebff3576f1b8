"""Strategies that refuse what cannot run: in the Trainer, when a module is given, and when its hooks have built it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from typing_extensions import override

from lightning_parallel import _lightning
from lightning_parallel.errors import ConfigurationError
from lightning_parallel.strategies.refusals import uninitialized_violations

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

_BUILDERS = ("configure_model", "setup")
"""Hooks in which a module may build what it trains: before them there is nothing to plan."""


class RefusingStrategy(ParallelStrategy):
    """Refuses with every reason that is known at a time, on rank 0."""

    _given: LightningModule | None
    joint_refusal = ""
    """The message about optimizers that compute with several parameters together, where a rank updates only some."""

    @property
    def module(self) -> LightningModule:
        """The user's module; exists once there is one."""
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def sends_tensors(self) -> bool:
        """Whether ranks send each other parameters."""
        return False

    def set_up_violations(self) -> list[str]:
        """Reasons that lie in the devices and the rules; known as soon as the Trainer is made."""
        return []

    def unbuilt_violations(self, module: LightningModule, *, is_fitting: bool) -> list[str]:
        """Reasons that lie in the Trainer and in methods of the module: known before hooks have built it.

        Args:
            module: The user's module.
            is_fitting: Whether it is to be trained.
        """
        return []

    def module_violations(self, module: LightningModule, *, is_fitting: bool) -> list[str]:
        """Reasons that lie in the module; known before processes start where the module is built by then.

        Args:
            module: The user's module.
            is_fitting: Whether it is to be trained.
        """
        raise NotImplementedError

    def refuse(self, violations: list[str]) -> None:
        """Raise with all `violations` on rank 0; the other ranks see the same ones and end without repeating them."""
        if violations:
            raise ConfigurationError(violations if self.global_rank == 0 else ["refused; rank 0 says why"])

    def check_module(self, module: LightningModule, *, is_built: bool = False) -> None:
        """Refuse a module that cannot be run; what its hooks have still to build is looked at later.

        Args:
            module: The module.
            is_built: Whether its hooks have run.
        """
        trainer = _lightning.attached_trainer(module)
        is_fitting = trainer is None or trainer.state.fn == TrainerFn.FITTING
        is_built = is_built or not any(is_overridden(name, module) for name in _BUILDERS)
        if is_built:
            self.refuse(uninitialized_violations(module))  # nothing else can be asked of such a module
        violations = self.module_violations if is_built else self.unbuilt_violations
        self.refuse(violations(module, is_fitting=is_fitting))

    @override
    def connect(self, model: LightningModule) -> None:
        super().connect(model)
        self.check_module(model)

    @property
    def _lightning_module(self) -> LightningModule | None:  # type: ignore[override]
        return self._given

    @_lightning_module.setter
    def _lightning_module(self, module: LightningModule | None) -> None:
        # Trainer.fit gives the module here before anything else, and then has words of its own for a compiled one.
        if module is not None and _lightning.is_compiled(module):
            self.refuse([_COMPILED])
        self._given = module


_COMPILED = (
    "torch.compile(module) compiles whole steps, before the module is made parallel; give the module itself, and let "
    "its layers be compiled: --strategy=NAME:compile=layers, or compile='layers' in Python"
)

"""`zero1_custom`: DDP with the optimizer state sharded."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_parallel import _lightning
from lightning_parallel.errors import check
from lightning_parallel.ranks.mesh import build_host_group
from lightning_parallel.strategies.ddp import DDPStrategy
from lightning_parallel.strategies.equal_copies import EqualGradients
from lightning_parallel.strategies.joint_updates import UNDER_ZERO
from lightning_parallel.techniques.optimizer_sharding import ShardedOptimizer, optimizer_violations

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class ZeroStrategy(DDPStrategy):
    """DDP whose optimizer state is sharded (ZeRO-1): the user's optimizer, groups and schedulers are kept.

    Takes the arguments of :class:`DDPStrategy`. A parameter belongs to one rank as a whole, so the largest parameter
    bounds how even the shares are.

    Example:
        >>> Trainer(strategy=ZeroStrategy(), devices=2)
    """

    _sharded: tuple[ShardedOptimizer, ...] = ()
    _gradients: EqualGradients | None = None
    joint_refusal = UNDER_ZERO

    @override
    def __getstate__(self) -> dict[str, Any]:
        # Process groups belong to this process; a copy shards its own optimizers.
        return {**super().__getstate__(), "_sharded": ()}

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        check(violation for optimizer in self.optimizers for violation in optimizer_violations(optimizer))
        host_group = build_host_group(self.root_device.type, timeout=self._timeout)
        self._gradients = None
        self._sharded = tuple(ShardedOptimizer(each, host_group, self._look_at_gradients) for each in self.optimizers)

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        if self.world_size > 1 and self.first_step.check != "off":
            self._gradients = EqualGradients(self.module, self.root_device)

    def _look_at_gradients(self, parameters: Collection[Tensor]) -> None:
        if self._gradients is not None:
            self._gradients.look_at(parameters)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        optimizer = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        for sharded in self._sharded:
            if sharded.optimizer is optimizer and not self._writes_parts:
                return sharded.gather_state() or {}
        return super().optimizer_state(optimizer)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        # That of other ranks' parameters is dropped before, not after: the device has no room for it.
        states = checkpoint["optimizer_states"]
        pairs = zip(self._sharded, states, strict=False)
        own = [{**state, "state": sharded.own_part(state["state"])} for sharded, state in pairs]
        super().load_optimizer_state_dict({**checkpoint, "optimizer_states": [*own, *states[len(own) :]]})

    @override
    def teardown(self) -> None:
        interrupted = _lightning.was_interrupted(self.lightning_module)
        for sharded in self._sharded:
            # After an error other ranks may be gone: a collective would wait for them until it times out.
            sharded.detach() if interrupted else sharded.make_whole()
        self._sharded = ()
        super().teardown()

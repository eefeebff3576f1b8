"""The calls around the steps of a sharded module, in order.

A microstep is: synchronize buffers, forward, note which parameters were gathered, backward, reduce. A window is one or
more microsteps and the update.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_parallel import _torch
from lightning_parallel.errors import ConfigurationError, FirstStepError
from lightning_parallel.module.unit_order import UnitOrder
from lightning_parallel.parallelize import Parallelized
from lightning_parallel.ranks.step_reads import step_noted
from lightning_parallel.step_hooks import StepHooks
from lightning_parallel.techniques.accumulation import GradientReduction, ZeroGrad
from lightning_parallel.techniques.buffer_sync import BufferSync
from lightning_parallel.techniques.local_update import LocalUpdate, is_elementwise
from lightning_parallel.techniques.pipeline.gradients import GradientsOfSharers, sum_shared_gradients
from lightning_parallel.techniques.pipeline.settling import Settling
from lightning_parallel.techniques.pipeline.stage_buffers import StageBuffers
from lightning_parallel.techniques.pipeline.step_losses import MicrobatchWeights
from lightning_parallel.techniques.pipeline.turns import check_loss
from lightning_parallel.techniques.replicate import reduce_gradients
from lightning_parallel.techniques.sharding import reshard_units
from lightning_parallel.techniques.step_writes import StepWrites
from lightning_parallel.techniques.unused import UnusedParameters
from lightning_parallel.techniques.update_in_backward import UpdateInBackward


class Steps(StepHooks):
    """The steps of one module under one strategy; `close` removes its hooks from the optimizers.

    Args:
        module: The sharded module.
        parallelized: The record of how it is parallel.
        device: This rank's device.
        ranks_on_device: Number of ranks that share the device's memory.
        tell: Called with a sentence for the user.
    """

    def __init__(
        self,
        module: nn.Module,
        parallelized: Parallelized,
        *,
        device: torch.device,
        ranks_on_device: int,
        tell: Callable[[str], None],
    ) -> None:
        policies = parallelized.plan.policies
        super().__init__(policies)
        self._module = module
        self._mesh = parallelized.mesh
        self._device = device
        self._lengths = parallelized.lengths
        self._is_manual = not getattr(module, "automatic_optimization", True)
        self._frees_before_backward = policies.frees_before_backward and not self._is_manual
        is_shared = self._mesh.gradient_group.size() > 1
        self._averaged = parallelized.averaged_parameters(module) if is_shared else []
        # Ranks of different stages have different buffers, so only those of one stage can agree on them.
        group = self._mesh.gradient_group if self._mesh.pipeline_group is not None else None
        self._buffers = BufferSync(module, group, self._mesh.stage_host_group, tell=tell)
        units = parallelized.units(module)
        stage = self._mesh.stage_host_group
        # A parameter that this rank gathered but did not use gets a gradient of zeros: other ranks may have used it,
        # and a reduction needs all ranks. On one rank it matters only where gradients are kept in a wider dtype.
        has_zeros = stage.size() > 1 or policies.sharding_dtypes.reduce is not None
        # The zeros of parameters that no rank used are removed after backward. An update in backward comes before that.
        self.order = UnitOrder(dict(zip(parallelized.sharding.units, units, strict=True)), stage)
        self._writes = StepWrites(module, units, stage)
        watched = units if has_zeros and not policies.optimizer_in_backward else []
        self._unused = UnusedParameters(watched, stage, self.order)
        self._reduction = GradientReduction(
            units,
            mode=policies.accumulation_sync,
            device=device,
            ranks_on_device=ranks_on_device,
            is_manual=self._is_manual,
            is_hybrid=self._mesh.sharding.ndim > 1,
            shows_gradients=policies.shows_gradients,
            group=stage,
            tell=tell,
        )

    @override
    def adopt(self, optimizers: Sequence[Optimizer], handed_out: Sequence[Any] = ()) -> None:
        self._on_optimizers += [ZeroGrad(optimizer, self._drop_held) for optimizer in (*optimizers, *handed_out)]
        self._on_optimizers += [LocalUpdate(optimizer) for optimizer in optimizers if is_elementwise(optimizer)]
        super().adopt(optimizers)
        if self._policies.optimizer_in_backward:
            self._on_optimizers += [UpdateInBackward(optimizer, self._averaged) for optimizer in optimizers]

    def _drop_held(self, parameters: Collection[Tensor]) -> None:
        self._reduction.drop(parameters)
        self._unused.forget(parameters)

    @override
    def begin(self) -> None:
        """Call it before a training step, and before a loop without training. A collective.

        It gives every rank the buffers of rank 0, or of the first rank of its stage.
        """
        self.order.begin()
        for lengths in self._lengths:
            lengths.forget()
        self._buffers.synchronize()
        self._writes.begin()

    meets_in_steps = True

    @property
    @override
    def place(self) -> str:
        return str(self.order.calls)

    @override
    def check_calls(self) -> None:
        self.order.check_now()

    def free_gathered(self) -> None:
        """Free parameters that a step left gathered, so that hooks which read or write parameters find the shards."""
        reshard_units(self._module)

    @override
    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        _torch.whole_operands.resume()  # after a backward that has failed
        try:
            with step_noted():
                yield
        except Exception as error:
            lengths = () if isinstance(error, FirstStepError) else self._lengths  # it has run the step once more
            if violations := [text for each in lengths for text in each.between_layers(error)]:
                raise ConfigurationError(violations) from error
            raise

    @override
    def around_step(self) -> contextlib.AbstractContextManager[None]:
        return self.order.step(goes_backward=self._is_manual)

    @override
    def after_forward(self) -> None:
        self._check_sequences()
        self._writes.keep_trained()
        self._unused.watch()
        # Under manual optimization the step has ended, and its last forward may have had no backward: hooks would find
        # gathered values, rounded to the dtype of computing, and lose what they write into them.
        if self._frees_before_backward:
            self._writes.keep()
        if self._is_manual or self._frees_before_backward:
            self.free_gathered()

    @override
    def after_evaluation(self) -> None:
        self._check_sequences()
        for lengths in self._lengths:
            lengths.forget()
        self.free_gathered()

    def _check_sequences(self) -> None:
        for lengths in self._lengths:
            lengths.check_left()

    @override
    def held(self) -> contextlib.AbstractContextManager[None]:
        return self._reduction.held()

    @override
    def before_backward(self, loss: Tensor) -> None:
        """Let whole parameters be averaged when backward through `loss` ends, once a window."""
        self._check_sequences()  # under manual optimization, `after_forward` comes only when the step has ended
        if not self._frees_before_backward:
            self._writes.keep()
        self._writes.keep_trained_until(loss)
        self._unused.watch()
        if self._reduction.is_first:
            # Zeros of `zero_grad(set_to_none=False)` stay gradients, as in one process. In later microsteps, zeros may
            # be those that replace missing gradients.
            self._unused.keep_present()
        self._reduction.before_backward()
        # At the end of backward: the hook `on_after_backward` comes before `after_backward`, and finds averaged ones.
        if self._averaged and loss.requires_grad and not self._reduction.is_held:
            _torch.autograd.after_backward(loss, self._average)
        if loss.requires_grad:  # between the hooks of the user that come before a backward and after it
            loss.register_hook(lambda _: _torch.whole_operands.pause())
            _torch.autograd.after_backward(loss, _torch.whole_operands.resume)

    @override
    def after_backward(self) -> None:
        """Agree with the other ranks on which parameters were used. A collective."""
        if self._is_manual:
            self._reduction.reduce_missed()
        if not self._reduction.holds_shards:
            self._unused.settle()
        self._reduction.after_backward()
        self._writes.after_backward()
        # The next forward may be that of another optimizer, which trains others: gathering takes that from the shards.
        if self._is_manual:
            self.free_gathered()

    @override
    def before_update(self) -> None:
        """Reduce gradients that are still held: under manual optimization, no backward may count as the last."""
        if self._reduction.reduce_rest():
            self._average()
            self._unused.settle()

    @override
    def after_update(self, optimizer: Optimizer) -> None:
        """Free parameters that are still gathered: they hold the values from before the update."""
        self._unused.forget(parameter for group in optimizer.param_groups for parameter in group["params"])
        self.free_gathered()
        self._reduction.after_update()

    @override
    @contextlib.contextmanager
    def tried(self) -> Iterator[None]:
        """Inside this context, a microstep is a window of its own, and nothing remains of it. A collective."""
        before = [(parameter, parameter.grad) for parameter in self._module.parameters()]
        with self._reduction.apart(), self._writes.dropped():
            yield
        for parameter, gradient in before:
            parameter.grad = gradient
        self._unused.forget(parameter for parameter, _ in before)
        self.free_gathered()
        self.begin()

    def _average(self) -> None:
        reduce_gradients(self._averaged, self._mesh.gradient_group, self._mesh.stage_host_group)


class PipelinedSteps(Steps):
    """Steps that run forward and backward inside the step, microbatch by microbatch."""

    def __init__(self, module: nn.Module, parallelized: Parallelized, **options: Any) -> None:
        super().__init__(module, parallelized, **options)
        assert parallelized.cut is not None
        self._cut = parallelized.cut
        self.settling = Settling()

    @property
    def batch_unit(self) -> int:
        """The number of samples of which batches are to be multiples, so that all have as many microbatches."""
        plan = self._cut.plan
        count = plan.policy.microbatches
        return 2 * plan.stages.num_stages if count == "auto" else int(count)

    microbatch_weights: MicrobatchWeights | None = None
    """The weights of the losses of microbatches, where a callback has any."""

    def before_microbatch_backward(self) -> None:
        """Call it before the backward of each microbatch."""
        self._writes.keep_trained()
        self._unused.watch()
        self._reduction.before_backward()
        self._reduction.hold_microbatches()

    def after_microbatches(self) -> None:
        """Reduce the gradients of the step, once, and sum those of parameters of several stages. A collective."""
        self._reduction.reduce_microbatches()
        if not self._reduction.holds_shards:
            self._unused.settle()
        # In each microstep of a window. Gradients of earlier microsteps are set aside meanwhile (`GradientsOfStep`), so
        # nothing is averaged or summed twice.
        self._average()
        sum_shared_gradients(list(self._module.parameters()))

    @override
    def around_step(self) -> contextlib.AbstractContextManager[None]:
        return self.order.step(goes_backward=True, has_microbatches=True)

    @override
    def _drop_held(self, parameters: Collection[Tensor]) -> None:
        """Do nothing: Lightning calls `zero_grad` after the step, when its gradients are there already."""

    @override
    def after_forward(self) -> None:
        """Do nothing: backward has run by now."""

    @override
    def before_backward(self, loss: Tensor) -> None:
        """Do nothing: the backward that Lightning runs only hands out gradients that are complete."""

    @override
    def after_backward(self) -> None:
        self._reduction.after_backward()


class TurnSteps(Steps):
    """Steps of a module whose stages take turns: each rank runs them once, on the whole batch."""

    def __init__(self, module: nn.Module, parallelized: Parallelized, **options: Any) -> None:
        super().__init__(module, parallelized, **options)
        cut = parallelized.cut
        assert cut is not None
        assert cut.turns is not None
        self._turns = cut.turns
        num_ranks = cut.group.size()
        everywhere = {n for n, owners in cut.owners_by_name.items() if len(owners.ranks) == num_ranks}
        is_shared = lambda name: name not in everywhere and self._turns.is_in_layer(name)  # noqa: E731
        self._stage_buffers = StageBuffers(module, cut, is_shared=is_shared)
        named = list(module.named_parameters())
        self._sharers = GradientsOfSharers([p for name, p in named if cut.turns.is_in_layer(name)])
        self._outside = [p for name, p in named if not cut.turns.is_in_layer(name)]
        self._groups = cut.group, cut.host_group

    @override
    def begin(self) -> None:
        super().begin()
        self._stage_buffers.note()

    @override
    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        with self._turns.opened(), super().forward():
            yield

    @override
    def after_forward(self) -> None:
        super().after_forward()
        self._stage_buffers.share()

    @override
    def after_evaluation(self) -> None:
        super().after_evaluation()
        self._stage_buffers.share()

    @override
    def before_backward(self, loss: Tensor) -> None:
        check_loss(loss)
        self._sharers.set_aside()
        super().before_backward(loss)

    @override
    def after_backward(self) -> None:
        super().after_backward()
        # The same on all ranks, but for rounding: some kernels of a GPU add in another order each time.
        reduce_gradients(self._outside, *self._groups)
        self._sharers.join()

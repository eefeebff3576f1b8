"""The steps of a module that DDP wraps."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from lightning.pytorch.overrides.distributed import prepare_for_backward
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_parallel import _torch
from lightning_parallel.errors import ConfigurationError
from lightning_parallel.policies import Policies
from lightning_parallel.ranks.mesh import build_host_group
from lightning_parallel.step_hooks import StepHooks
from lightning_parallel.techniques.accumulation import AccumulationWindow
from lightning_parallel.techniques.bucket_views import BucketViews
from lightning_parallel.techniques.replica_writes import ReplicaWrites
from lightning_parallel.techniques.replicate import reduce_gradients
from lightning_parallel.techniques.unused_replicas import UnusedLook

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

_MOST = 8
"""Names of parameters in a message."""


class DDPSteps(StepHooks):
    """Wraps a module in DDP, and again when other parameters are to be trained, until `unwrap`.

    Args:
        policies: The rules.
        module: The user's module.
        wrap: Wraps it; told whether to look for unused parameters in each step, and whether all ranks have the same
            values already. A collective.
        set_model: Takes what Lightning is to call: the wrapped module, or the module itself.
        find_unused: Whether to look; ``None`` if the first step is to decide.
        tell: Called with a sentence for the user.
    """

    def __init__(
        self,
        policies: Policies,
        module: LightningModule,
        *,
        wrap: Callable[[LightningModule, bool, bool], DistributedDataParallel],
        set_model: Callable[[nn.Module], None],
        find_unused: bool | None,
        tell: Callable[[str], None],
    ) -> None:
        super().__init__(policies)
        self._module, self._wrap, self._set_model, self._tell = module, wrap, set_model, tell
        self._finds, self._is_auto = bool(find_unused), find_unused is None
        self._window = AccumulationWindow()
        self._writes = ReplicaWrites(module)
        self._has_own_forward = "forward" in vars(module)
        self._own_backward = vars(module).get("backward")
        self._wrap_again(is_synced=False)

    def _wrap_again(self, *, is_synced: bool) -> None:
        self._set_model(self._module)
        self._wrapped = self._wrap(self._module, self._finds, is_synced)
        self._named = {name: p for name, p in self._module.named_parameters() if p.requires_grad}  # DDP's order
        self._reduced = _trainable(self._module)
        self._views = BucketViews(list(self._named.values() if self._wrapped.gradient_as_bucket_view else ()))
        self._looks = self._is_auto and not self._finds
        self._set_model(self._wrapped)

    def unwrap(self) -> None:
        """Let Lightning call the module itself again."""
        self._set_model(self._module)
        # Lightning's redirection of forward leaves a bound method on the module, which copies of it would share.
        if not self._has_own_forward:
            vars(self._module).pop("forward", None)
        self._watch_no_more()

    @override
    def begin(self) -> None:
        trainable = _trainable(self._module)
        # Under manual optimization, a step freezes the parameters of the other optimizers for a while: those that are
        # trainable may be fewer than DDP reduces, but no others.
        is_automatic = self._module.automatic_optimization
        is_other = trainable != self._reduced if is_automatic else not trainable <= self._reduced
        if (is_other or self._finds != self._wrapped.find_unused_parameters) and self._module.training:
            # DDP reduces the parameters that were trainable when it was made, and waits for all of them. The new one
            # would not reduce gradients held for parameters that are frozen now, so they are reduced before.
            self.before_update()
            self._wrap_again(is_synced=False)
        self._writes.note()

    @override
    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        if self._policies.accumulation_sync == "every":
            yield
            return
        # Both: DDP reduces no bucket here, and the window notes that there is something left to reduce.
        with self._window.held(), self._wrapped.no_sync():
            yield

    @override
    def before_backward(self, loss: Tensor) -> None:
        self._writes.check()
        self._views.put_back()
        if loss.requires_grad:
            _torch.autograd.after_backward(loss, lambda: self._views.note())
        # DDP prepares its reducer at the end of forward, which under manual optimization comes after backward.
        if not self._module.automatic_optimization:
            if not _trainable(self._module) <= self._reduced:
                # Thawed by the step, such as the half of a pair that was frozen when training began. From here on, all
                # that was ever trained is reduced: a step that takes turns would have it made again in each turn.
                self.before_update()
                with _thawed(self._reduced):
                    self._wrap_again(is_synced=True)
            prepare_for_backward(self._wrapped, loss)
        elif self._reduced and not self._window.is_held:
            # For this once: a module that had it all the time could be neither copied nor pickled.
            vars(self._module)["backward"] = functools.partial(self._backward, self._module.backward)

    def _backward(self, backward: Callable[..., None], loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """A backward after which it is looked at what it leaves out, or refused. A collective.

        That is behind the hook `on_before_backward`, in which parameters may be frozen, and before `on_after_backward`,
        in which ranks may meet.
        """
        self._watch_no_more()
        if _trainable(self._module) != self._reduced:
            # The step has frozen or thawed some, and DDP would hand out zeros for these, or not reduce those.
            self.before_update()
            self._wrap_again(is_synced=True)  # writing into parameters now would break the graph
            prepare_for_backward(self._wrapped, loss)
        backward = functools.partial(backward, loss)
        if self._finds:
            backward(*args, **kwargs)
            return
        if not self._looks:
            backward(*args, **kwargs)
            self._check_reduced()
            return
        assert dist.group.WORLD is not None
        with UnusedLook(self._named) as look:
            backward(*args, **kwargs)
        self._decide(look.complete(dist.group.WORLD))

    def _watch_no_more(self) -> None:
        vars(self._module).pop("backward", None)
        if self._own_backward is not None:
            vars(self._module)["backward"] = self._own_backward

    def _decide(self, unused: Sequence[str]) -> None:
        self._looks, self._finds = False, bool(unused)
        if unused:
            self._tell(
                f"find_unused_parameters='auto': the first step leaves {_some(unused)} without a gradient, on some "
                "rank or on all. DDP looks for such parameters in each step from now on, which takes time; it need not "
                "if those that no step uses are frozen (requires_grad_(False))"
            )

    def _check_reduced(self) -> None:
        """Refuse a backward that leaves DDP waiting, before anything is updated.

        Raises:
            ConfigurationError: With the names of the parameters.
        """
        indices = _torch.ddp.unreduced_indices(self._wrapped)
        if indices is not None:
            names = list(self._named)
            has_looked = " The first step has used all, so 'auto' does not look." if self._is_auto else ""
            raise ConfigurationError([_LEFT_OUT.format(_some([names[index] for index in indices])) + has_looked])

    @override
    def after_backward(self) -> None:
        self._window.after_backward()

    @override
    def before_update(self) -> None:
        """Reduce gradients that were held: manual optimization may step without a backward in which DDP reduces."""
        if self._window.take_rest():
            assert dist.group.WORLD is not None
            parameters = list(self._module.parameters())
            reduce_gradients(parameters, dist.group.WORLD, build_host_group(parameters[0].device.type))


def _trainable(module: nn.Module) -> set[nn.Parameter]:
    return {parameter for parameter in module.parameters() if parameter.requires_grad}


@contextlib.contextmanager
def _thawed(parameters: set[nn.Parameter]) -> Iterator[None]:
    """Inside this context, these are to be trained, too."""
    frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return f"{len(names)} trainable parameters ({', '.join(names[:_MOST])}{more})"


_LEFT_OUT = (
    "this step leaves {} without a gradient on this rank, and DDP waits for each of them. Give "
    "find_unused_parameters=true, with which it looks for such parameters in each step, or freeze those that no step "
    "uses (requires_grad_(False))."
)

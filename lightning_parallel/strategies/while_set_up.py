"""Settings that last from a strategy's setup to its teardown, beside those of the module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from torchmetrics import Metric

from lightning_parallel.ranks.mesh import Mesh
from lightning_parallel.strategies.compared_metrics import metrics_in
from lightning_parallel.strategies.evaluation import inference_mode_left
from lightning_parallel.strategies.metric_sync import metrics_synced_over
from lightning_parallel.strategies.prediction_writers import written_once
from lightning_parallel.strategies.shared_sums import shared_sums_told
from lightning_parallel.strategies.whole_values import whole_values

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

    from lightning_parallel._torch.written_numbers import Number

_SHARDED = "_is_fsdp_managed_module"


class OpenContexts(ExitStack):
    """Contexts that are open in hooks of the user, who may copy the trainer: a copy has none of them."""

    def __reduce__(self) -> tuple[type[OpenContexts], tuple[()]]:
        # What is suspended cannot be copied, and closing it twice would undo what a second fit has opened.
        return type(self), ()


@contextmanager
def while_set_up(
    trainer: Trainer,
    module: LightningModule,
    mesh: Mesh,
    tell_written: Callable[[str, Number], None],
    *,
    replaces: bool,
) -> Iterator[None]:
    """Inside this context, a module that is sharded or shared can run and be read, and what ranks share counts once.

    Args:
        trainer: The trainer, with its loops and callbacks.
        module: The module, made parallel.
        mesh: The ranks.
        tell_written: Called where user code writes into a tensor of which each rank has a part.
        replaces: Whether parameters are sharded, split or cut; else all that is read of them is whole.
    """
    group = mesh.data.get_group()
    with ExitStack() as stack:
        if replaces:
            stack.enter_context(whole_values(trainer, module, mesh, tell_written))
        if mesh.stage_host_group.size() > 1 and replaces:
            stack.enter_context(_known_as_sharded(module))
        stack.enter_context(inference_mode_left(trainer))
        if mesh.shares_samples:
            stack.enter_context(metrics_synced_over(group, lambda: _metrics_of(trainer, module)))
            stack.enter_context(written_once(trainer, group, is_writing=mesh.is_first_reader))
            stack.enter_context(shared_sums_told(group.size()))
        yield


def _metrics_of(trainer: Trainer, module: LightningModule) -> list[Metric]:
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    of_callbacks = [each for callback in callbacks for each in vars(callback).values()]
    return [*metrics_in(module).values(), *(each for each in of_callbacks if isinstance(each, Metric))]


@contextmanager
def _known_as_sharded(module: LightningModule) -> Iterator[None]:
    """Let modules of Hugging Face know that all ranks have to call the same layers.

    Those with LayerDrop (wav2vec 2.0 and its kin) call each layer then, and drop its result; `generate` goes on until
    all ranks are done. `transformers.distributed.fsdp.is_fsdp_managed_module` looks for the attribute.
    """
    # By bases: sharding has given units classes of their own.
    unmarked = [
        child
        for child in module.modules()
        if any(base.__module__.startswith("transformers.") for base in type(child).__mro__)
        and not hasattr(child, _SHARDED)
    ]
    for child in unmarked:
        vars(child)[_SHARDED] = True
    try:
        yield
    finally:
        for child in unmarked:
            vars(child).pop(_SHARDED, None)

"""Every private name of Lightning and torchmetrics that the package touches, but for what its classes inherit.

Each says since which version it is there and which public call it waits for. What strategies inherit from Lightning's,
such as `_configure_launcher`, they call and override where they stand. Nothing else in the package may import a name of
Lightning that begins with an underscore, or read one from an object (a test enforces it).
"""

from __future__ import annotations

import contextlib
import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.plugins.precision.amp import _optimizer_handles_unscaling
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.fabric.utilities.distributed import (
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
    _sync_ddp_if_available,
)
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.loops.progress import _BaseProgress
from lightning.pytorch.strategies.ddp import _DDPForwardRedirection
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.data_connector import _get_distributed_sampler, _request_dataloader
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities import grads
from lightning.pytorch.utilities.data import _is_dataloader_shuffled, _update_dataloader
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lightning_parallel._lightning import actions as actions
from lightning_parallel._lightning import epochs as epochs
from lightning_parallel._lightning import fetchers as fetchers
from lightning_parallel._lightning import logs as logs
from lightning_parallel._lightning import metrics as metrics
from lightning_parallel._lightning import resuming as resuming
from lightning_parallel._lightning import signals as signals

if TYPE_CHECKING:
    from lightning.fabric.plugins.environments import ClusterEnvironment
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.strategies import ParallelStrategy, Strategy
    from torch.distributed.device_mesh import DeviceMesh

# Classes ------------------------------------------------------------------------------------------------------------

DDPForwardRedirection = _DDPForwardRedirection
"""Lets DDP's `forward` run a step method; since 2.1, waits for a public name."""

SubprocessLauncher = _SubprocessScriptLauncher
"""Starts the script once more for each further rank; since 1.6, waits for a public name."""

ProcessLauncher = _MultiProcessingLauncher
"""Starts functions in processes of their own; since 1.6, waits for a public name."""

Progress = _BaseProgress
"""Counters of loops; since 2.0, waits for a public way to set a loop back."""

ResultCollection = _ResultCollection
"""Values that a loop has logged; since 1.6, waits for a public way to log nowhere."""


@contextlib.contextmanager
def gradient_norms_read(of_all: Callable[[Mapping[str, Any]], dict[str, float]]) -> Iterator[None]:
    """Inside this context, `lightning.pytorch.utilities.grad_norm` has the norms of all parameters, one by one.

    It gives a list of them to `torch.tensor`, which reads their memory, where a DTensor has none, nor a parameter of
    another stage. `torch` in its module, `grads`, since 1.4, is replaced, and not the function, which users have
    imported; its variable `norms`, which it returns, is that of 1.4, too.

    Args:
        of_all: Takes names and norms, and returns those that there are on any rank, as numbers.
    """

    def tensor(_: Sequence[Any]) -> Tensor:
        caller = inspect.currentframe()
        assert caller is not None
        assert caller.f_back is not None
        norms = caller.f_back.f_locals["norms"]
        found = of_all(norms)
        norms.clear()
        norms.update({name: torch.tensor(norm) for name, norm in found.items()})
        return torch.tensor(list(found.values()))

    grads.torch = types.SimpleNamespace(tensor=tensor)  # type: ignore[assignment]
    try:
        yield
    finally:
        grads.torch = torch


def graph_loggers(loggers: Iterable[Any]) -> list[str]:
    """Names of the classes of loggers that run the module to log its graph.

    `TensorBoardLogger._log_graph`, since 1.0; waits for a public attribute.
    """
    # By what they hold: the logger of `fast_dev_run` has every attribute.
    return [type(logger).__name__ for logger in loggers if vars(logger).get("_log_graph", False)]


# Strategies and modules ---------------------------------------------------------------------------------------------


def attached_trainer(module: LightningModule) -> Trainer | None:
    """The trainer of `module`, if it has one.

    `LightningModule._trainer`, since 1.4; the public `trainer` raises where there is none.
    """
    return module._trainer


def was_interrupted(module: LightningModule | None) -> bool:
    """Whether the run of `module` ends after an error: other ranks may be gone."""
    trainer = None if module is None else attached_trainer(module)
    return trainer is not None and trainer.state.status == TrainerStatus.INTERRUPTED


def is_compiled(module: LightningModule) -> bool:
    """Whether `module` came from `torch.compile`. `LightningModule._compiler_ctx`, since 2.0; no public spelling."""
    return module._compiler_ctx is not None


def attach_module(strategy: Strategy, module: LightningModule | None) -> None:
    """Let `strategy` have this module, without connecting it anew; with ``None`` its teardown has none to move.

    `Strategy._lightning_module`, since 1.6; the public `connect` wraps the module, too.
    """
    strategy._lightning_module = module


def layer_sync(strategy: ParallelStrategy) -> Any:
    """The plugin that makes BatchNorm of all ranks one, ``None`` without `sync_batchnorm`.

    `ParallelStrategy._layer_sync`, since 1.6; waits for a public property.
    """
    return strategy._layer_sync


def set_device_mesh(module: LightningModule, mesh: DeviceMesh | None) -> None:
    """Let ``module.device_mesh`` be `mesh`.

    `LightningModule._device_mesh`, since 2.3; Lightning sets it for its own strategy only.
    """
    module._device_mesh = mesh


def set_known_device(module: LightningModule, device: torch.device) -> None:
    """Let ``module.device`` be `device`, and move nothing.

    `_update_properties`, since 2.2; waits for a public setter.
    """
    _update_properties(module, device=device)


def move_optimizers(optimizers: Iterable[Optimizer], device: torch.device) -> None:
    """Move the state of `optimizers` to `device`.

    `_optimizers_to_device`, since 1.8; waits for a public name.
    """
    _optimizers_to_device(optimizers, device)


HANDED_OUT = "_lightning_optimizers"
"""The attribute of strategies from which `LightningModule.optimizers` reads; since 1.6, waits for a public name."""


def handed_out(optimizer: Optimizer, strategy: Any) -> LightningOptimizer:
    """The wrapper of `optimizer` that a step sees under manual optimization.

    Args:
        optimizer: The optimizer.
        strategy: What runs its steps.

    `LightningOptimizer._strategy`, since 1.6; waits for an argument of the constructor.
    """
    wrapped = LightningOptimizer(optimizer)
    wrapped._strategy = strategy
    return wrapped


def handles_unscaling(optimizer: Optimizer) -> bool:
    """Whether `optimizer` divides gradients by the loss scale itself, when it steps.

    `_optimizer_handles_unscaling`, since 1.9; waits for a public name.
    """
    return _optimizer_handles_unscaling(optimizer)


# Process groups -----------------------------------------------------------------------------------------------------


def default_backend(device: torch.device) -> str:
    """The backend of collectives on `device`.

    `_get_default_process_group_backend_for_device`, since 1.8; waits for a public name.
    """
    return _get_default_process_group_backend_for_device(device)


def init_process_group(environment: ClusterEnvironment, backend: str, **kwargs: Any) -> None:
    """Make the process group of all ranks that `environment` names, if there is none, and end it with the process.

    Args:
        environment: Knows this rank, their number, and where they meet.
        backend: As `default_backend` says, or another.
        **kwargs: For `torch.distributed.init_process_group`.

    `_init_dist_connection`, since 1.8; waits for a public name.
    """
    _init_dist_connection(environment, backend, **kwargs)


def reduced(tensor: Tensor, group: Any, reduce_op: Any) -> Tensor:
    """`tensor` reduced over the ranks of `group`; itself where there is no group. A collective.

    `_sync_ddp_if_available`, since 0.8; waits for a public name.
    """
    return _sync_ddp_if_available(tensor, group, reduce_op=reduce_op)


# Loaders ------------------------------------------------------------------------------------------------------------


def is_distributed(trainer: Trainer) -> bool:
    """Whether the strategy of `trainer` runs several ranks that read samples.

    `Trainer._accelerator_connector`, since 1.5; waits for a public property.
    """
    return bool(trainer._accelerator_connector.is_distributed)


def deals_out_samples(trainer: Trainer) -> bool:
    """The setting `use_distributed_sampler` of `trainer`.

    `Trainer._accelerator_connector.use_distributed_sampler`, since 2.0; waits for a public property.
    """
    return bool(trainer._accelerator_connector.use_distributed_sampler)


def set_deals_out_samples(trainer: Trainer, is_on: bool) -> None:
    """Set what `deals_out_samples` says; as there."""
    trainer._accelerator_connector.use_distributed_sampler = is_on


def sampler_of_rank(loader: DataLoader[Any], *, overfit_batches: float, **kwargs: Any) -> Any:
    """The sampler of this rank, which shuffles if that of `loader` does.

    Args:
        loader: A loader of a map-style data set.
        overfit_batches: The trainer's.
        **kwargs: The number of ranks and this one, as `distributed_sampler_kwargs` has them.

    `_is_dataloader_shuffled`, since 1.6; `_get_distributed_sampler`, since 0.8. They wait for a trainer that does not
    shuffle what is in order.
    """
    return _get_distributed_sampler(loader, _is_dataloader_shuffled(loader), overfit_batches=overfit_batches, **kwargs)


def with_sampler(loader: DataLoader[Any], sampler: Any) -> DataLoader[Any]:
    """`loader` with another sampler. `_update_dataloader`, since 1.5; waits as `sampler_of_rank` does."""
    return _update_dataloader(loader, sampler)


def training_source(trainer: Trainer) -> Any:
    """Where the training loaders come from: its `instance` is a module, a data module or loaders.

    `_FitLoop._data_source`, since 2.0; waits for a public property.
    """
    return trainer.fit_loop._data_source


def request_loaders(source: Any) -> Any:
    """Ask `training_source` for its loaders. `_request_dataloader`, since 1.6; waits for a public name."""
    return _request_dataloader(source)


def training_loaders(trainer: Trainer) -> Any:
    """The `CombinedLoader` of training, ``None`` where there is none yet.

    `_FitLoop._combined_loader`, since 2.0; the public `Trainer.train_dataloader` sets it up where there is none.
    """
    return trainer.fit_loop._combined_loader


def training_iterator(trainer: Trainer) -> object:
    """The iterator over the training loaders in this epoch, ``None`` outside of one.

    `CombinedLoader._iterator`, since 2.0; waits for a public property.
    """
    found = getattr(trainer.fit_loop._combined_loader, "_iterator", None)
    return found.inner if isinstance(found, epochs.Ahead) else found


def drop_loaders(trainer: Trainer) -> None:
    """Let `trainer` ask for its training loaders again.

    `_FitLoop._data_fetcher`, since 1.5, and `_combined_loader`, since 2.0; wait for a public call.
    """
    if trainer.fit_loop._data_fetcher is not None:
        trainer.fit_loop._data_fetcher.teardown()
    trainer.fit_loop._combined_loader = trainer.fit_loop._data_fetcher = None


# Training without an epoch ------------------------------------------------------------------------------------------


def training_fetcher(trainer: Trainer) -> Any:
    """The fetcher of training batches. `_FitLoop._data_fetcher`, since 1.5; waits for a public property."""
    return trainer.fit_loop._data_fetcher


def call_module_hook(trainer: Trainer, name: str) -> None:
    """Call the hook `name` of the module as the trainer does.

    `call._call_lightning_module_hook`, since 1.6; waits for a public name.
    """
    call._call_lightning_module_hook(trainer, name)


def is_accumulating(trainer: Trainer) -> bool:
    """Whether the accumulation window of `trainer` is open.

    `_TrainingEpochLoop._should_accumulate`, since 1.1; waits for a public property.
    """
    return trainer.fit_loop.epoch_loop._should_accumulate()


def reset_logged(trainer: Trainer) -> None:
    """Forget what was logged so far. `Trainer._logger_connector`, since 1.6; waits for a public call."""
    trainer._logger_connector.reset_metrics()
    trainer._logger_connector.reset_results()


RESULTS = "_results"
"""The attribute of `_TrainingEpochLoop` that holds its `ResultCollection`; since 1.6, waits for a public name."""

"""The loop that one would write without a Trainer: torch's DDP over a module's own step, optimizer and loader."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler
from typing_extensions import override

from lightning_parallel.bench.stopwatch import Stopwatch
from lightning_parallel.bench.trained import resized, train_loader_of, with_batches
from lightning_parallel.errors import ConfigurationError, check

if TYPE_CHECKING:
    from lightning.pytorch import LightningDataModule, LightningModule

_AUTOCAST = {"32-true": None, "32": None, 32: None, None: None, "bf16-mixed": torch.bfloat16}
_UNBOUNDED = 1000


class LoopSettings:
    """The settings of a recipe's Trainer that the loop follows; it stands where modules ask for their trainer.

    Args:
        trainer: Arguments of the Trainer.
        rank: The number of this process.
        size: How many there are.

    Attributes:
        estimated_stepping_batches: Updates of the whole run, which schedules ask for.
    """

    def __init__(self, trainer: Mapping[str, Any], *, rank: int, size: int) -> None:
        self.accumulate_grad_batches = int(trainer.get("accumulate_grad_batches") or 1)
        self.gradient_clip_val = trainer.get("gradient_clip_val")
        self.gradient_clip_algorithm = trainer.get("gradient_clip_algorithm") or "norm"
        self.precision = trainer.get("precision")
        self.max_epochs = trainer.get("max_epochs") or _UNBOUNDED
        self.global_rank, self.world_size = rank, size
        self.current_epoch = self.global_step = 0
        self.is_global_zero, self.training, self.sanity_checking = rank == 0, True, False
        self.estimated_stepping_batches: float = 0
        self.datamodule: Any = None
        self.logger: Any = None
        self.loggers: list[Any] = []
        self.callbacks: list[Any] = []

    def violations(self, module: LightningModule) -> list[str]:
        """Reasons why the loop does not train `module`; empty if it does."""
        found = []
        if not module.automatic_optimization:
            found.append("loop takes no manual optimization, where the module is its own loop; leave loop out")
        if self.precision not in _AUTOCAST:
            found.append(f"loop trains in 32-true or bf16-mixed, and precision is {self.precision}; leave loop out")
        return found


def train_loop(
    module: LightningModule,
    data: LightningDataModule | None,
    settings: LoopSettings,
    *,
    watch: Stopwatch,
    global_batches: int,
) -> None:
    """Train until `watch` has measured everything. The process group is there, if there are several ranks.

    Args:
        module: The recipe's module.
        data: Its data module, if it has one.
        settings: What the loop knows of the Trainer.
        watch: The stopwatch, which knows the device.
        global_batches: The global batch of a microstep, in batches of the loader.
    """
    check(settings.violations(module))
    with _attached(module, settings):
        _set_up(module, data, settings)
        loader = _loader(train_loader_of(module, data), settings, global_batches)
        settings.estimated_stepping_batches = settings.max_epochs * len(loader) // settings.accumulate_grad_batches
        module.to(watch.device)
        optimizer, schedule = _optimizer(module)
        stepped: nn.Module = _Step(module)
        if settings.world_size > 1:
            ids = None if watch.device.type == "cpu" else [watch.device.index]
            stepped = DistributedDataParallel(stepped, device_ids=ids, gradient_as_bucket_view=True)
        _train(stepped, optimizer, schedule, _epochs(loader), settings, watch)


class _Step(nn.Module):
    """The module's training step as a forward, so that DDP is around it."""

    def __init__(self, module: LightningModule) -> None:
        super().__init__()
        self.module = module

    @override
    def forward(self, batch: Any, number: int) -> Tensor:
        output = self.module.training_step(batch, number)
        return output["loss"] if isinstance(output, Mapping) else output  # type: ignore[return-value]


def _train(
    step: nn.Module,
    optimizer: Any,
    schedule: Any,
    batches: Iterator[Any],
    settings: LoopSettings,
    watch: Stopwatch,
) -> None:
    accumulated, dtype = settings.accumulate_grad_batches, _AUTOCAST[settings.precision]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, batch in enumerate(batches):
        batch = move_data_to_device(batch, watch.device)
        is_first, is_last = number % accumulated == 0, (number + 1) % accumulated == 0
        if is_first:
            if not watch.begin_step(batch, settings.world_size * accumulated):
                return
            optimizer.zero_grad()
        waits = isinstance(step, DistributedDataParallel) and not is_last
        with step.no_sync() if waits else contextlib.nullcontext():  # type: ignore[operator]
            with torch.autocast(watch.device.type, dtype or torch.bfloat16, enabled=dtype is not None):
                loss = step(batch, number)
            (loss / accumulated).backward()
        if is_last:
            _clip(parameters, settings)
            optimizer.step()
            settings.global_step += 1
            if schedule is not None:
                schedule.step()


def _clip(parameters: list[Tensor], settings: LoopSettings) -> None:
    if settings.gradient_clip_val:
        by_norm = settings.gradient_clip_algorithm == "norm"
        clip: Any = nn.utils.clip_grad_norm_ if by_norm else nn.utils.clip_grad_value_
        clip(parameters, settings.gradient_clip_val)


def _optimizer(module: LightningModule) -> tuple[Any, Any]:
    """The one optimizer of a module, and its schedule if that has a step for each update."""
    found: Any = module.configure_optimizers()
    if isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], list | tuple):
        optimizers, schedules = found
        found = {"optimizer": optimizers, "lr_scheduler": schedules[0] if schedules else None}
    elif not isinstance(found, Mapping):
        found = {"optimizer": found}
    optimizer, schedule = found["optimizer"], found.get("lr_scheduler")
    if isinstance(optimizer, list | tuple):
        count = len(optimizer)
        check([f"loop takes one optimizer, and there are {count}; leave loop out"] if count != 1 else [])
        (optimizer,) = optimizer
    is_of_steps = isinstance(schedule, Mapping) and schedule.get("interval") == "step"
    return optimizer, schedule["scheduler"] if is_of_steps else None


def _set_up(module: LightningModule, data: LightningDataModule | None, settings: LoopSettings) -> None:
    """Call the hooks before training, in Lightning's order."""
    holders: list[Any] = [module] if data is None else [data, module]
    settings.datamodule = data
    if data is not None:
        data.trainer = settings  # type: ignore[assignment]
    if settings.is_global_zero:
        for holder in holders:
            holder.prepare_data()
    if settings.world_size > 1:
        dist.barrier()
    for holder in holders:
        holder.setup("fit")
    module.configure_model()


def _loader(loader: Any, settings: LoopSettings, global_batches: int) -> DataLoader[Any]:
    """This rank's batches of the recipe's `loader`."""
    size = settings.world_size
    loader = resized(loader, global_batches, size)
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        found = type(loader).__name__
        raise ConfigurationError([f"loop takes one torch DataLoader with a length, and not a {found}; leave loop out"])
    if size == 1:
        return loader
    if loader.batch_size is None:
        raise ConfigurationError(["loop takes a batch_size on several devices, and no batch_sampler; leave loop out"])
    shuffles = isinstance(loader.sampler, RandomSampler)
    sampler: Any = DistributedSampler(
        loader.dataset, size, settings.global_rank, shuffle=shuffles, drop_last=loader.drop_last
    )
    return with_batches(loader, loader.batch_size, sampler)


def _epochs(loader: DataLoader[Any]) -> Iterator[Any]:
    for epoch in range(_UNBOUNDED):
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(epoch)
        yield from loader


@contextlib.contextmanager
def _attached(module: LightningModule, settings: LoopSettings) -> Iterator[None]:
    """`module` with the settings in place of a trainer, and nowhere to log to."""
    module.trainer = settings  # type: ignore[assignment]
    vars(module).update(log=lambda *args, **kwargs: None, log_dict=lambda *args, **kwargs: None)
    module.train()
    try:
        yield
    finally:
        module.trainer = None
        for name in ("log", "log_dict"):
            vars(module).pop(name)

"""What ranks do in tests of the lifecycle: functions that a pool can run on every rank."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_parallel import full_state_dict
from tests.data import data_of, loader
from tests.models.cases import CASES, ByteGPT
from tests.parity import trainer_for

Weights = dict[str, Tensor]


def every_entry_point(strategy: str, num_ranks: int, case: str = "byte_gpt") -> dict[str, Any]:
    """Validate, fit with sanity steps and validation, validate, test, predict: the same objects throughout."""
    L.seed_everything(3, verbose=False)
    module = CASES[case]("adamw")
    trainer = trainer_for(strategy, num_ranks, num_sanity_val_steps=2, gradient_clip_val=1.0)
    found: dict[str, Any] = {"before": trainer.validate(module, loader(num_ranks, 2, case), verbose=False)}
    trainer.fit(module, loader(num_ranks, 4, case), loader(num_ranks, 2, case))
    found["during"] = {k: v.item() for k, v in trainer.callback_metrics.items()}
    found["after"] = trainer.validate(module, loader(num_ranks, 2, case), verbose=False)
    found["test"] = trainer.test(module, loader(num_ranks, 2, case), verbose=False)
    predictions = trainer.predict(module, loader(num_ranks, 3, case))
    found["predictions"] = torch.stack(predictions)
    found["weights"] = full_state_dict(trainer)
    return found


def forced_inference_mode(strategy: str, num_ranks: int) -> tuple[list[Any], Weights]:
    """Evaluate before training, as on a GPU: Lightning takes `no_grad` by itself where the backend is gloo."""
    with mock.patch("lightning.pytorch.loops.utilities.dist", SimpleNamespace(get_backend=lambda: "nccl")):
        L.seed_everything(3, verbose=False)
        module = ByteGPT("sgd")
        trainer = trainer_for(strategy, num_ranks)
        before = trainer.validate(module, loader(num_ranks, 2), verbose=False)
        trainer.fit(module, loader(num_ranks))
    return before, full_state_dict(trainer)


def marks(module: nn.Module) -> list[str]:
    """Everything on a module that could be somebody else's: classes, instance attributes, hooks, kinds of tensors."""
    found = []
    for path, child in module.named_modules():
        hooks = sum(len(value) for name, value in vars(child).items() if name.endswith("_hooks") and value)
        own = sorted(name for name in vars(child) if name not in ("_hparams", "_device_mesh", "_trainer"))
        kinds = sorted({type(p).__name__ for p in child.parameters(recurse=False)})
        found.append(f"{path}: {type(child).__module__}.{type(child).__name__} {hooks} {own} {kinds}")
    return found


def fit_twice(first: str, second: str, num_ranks: int, case: str) -> dict[str, Any]:
    """Fit under one name, look at the module, copy and pickle it, then fit it under another name."""
    L.seed_everything(3, verbose=False)
    module = CASES[case]("adamw")
    plain = CASES[case]("adamw")
    objects = list(module.parameters())
    trainer = trainer_for(first, num_ranks)
    trainer.fit(module, loader(num_ranks, 3, case))
    if case == "configure_model":
        plain.configure_model()
    found = {
        "marks": [a for a, b in zip(marks(module), marks(plain), strict=True) if a != b],
        "same objects": [a is b for a, b in zip(module.parameters(), objects, strict=False)],
        "equal copies": all(
            torch.equal(a, b)
            for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)))
            for a, b in zip(module.state_dict().values(), other.state_dict().values(), strict=True)
        ),
        "gradients": [name for name, p in module.named_parameters() if p.grad is not None],
    }
    trainer.save_checkpoint("after-fit.ckpt")
    again = trainer_for(second, num_ranks)
    again.fit(module, loader(num_ranks, 3, case))
    found["weights"] = full_state_dict(again)
    return found


def process_groups_after_each_fit(name: str, num_ranks: int) -> list[int]:
    """How many process groups exist after the first fit of a process, the second..."""
    counts = []
    for _ in range(3):
        trainer_for(name, num_ranks).fit(CASES["byte_gpt"]("sgd"), loader(num_ranks, 1))
        counts.append(len(dist.distributed_c10d._world.pg_names))
    return counts


class StopAt(Callback):
    """Ends training after so many steps, and nothing else."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        trainer.should_stop = trainer.should_stop or trainer.global_step >= self.step


def save(strategy: str, num_ranks: int, path: str, case: str = "parameter_groups") -> Weights:
    """Two epochs, with a checkpoint after the first, in the middle of training and after `fit`."""
    L.seed_everything(3, verbose=False)
    module = CASES[case]("adamw")

    class Save(Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, *args: Any) -> None:
            if trainer.current_epoch == 0:
                trainer.save_checkpoint(path)

    trainer = trainer_for(strategy, num_ranks, max_epochs=2, callbacks=[Save()], gradient_clip_val=0.5)
    trainer.fit(module, loader(num_ranks, 3, case))
    trainer.save_checkpoint(f"{path}.end")
    return full_state_dict(trainer)


def resume(strategy: str, num_ranks: int, path: str, case: str = "parameter_groups") -> Weights:
    """Train the second epoch from a checkpoint, starting from other weights."""
    L.seed_everything(11, verbose=False)
    module = CASES[case]("adamw")
    trainer = trainer_for(strategy, num_ranks, max_epochs=2, gradient_clip_val=0.5)
    trainer.fit(module, loader(num_ranks, 3, case), ckpt_path=path)
    return full_state_dict(trainer)


def with_everything_on(strategy: str, num_ranks: int, folder: str) -> dict[str, Any]:
    """The callbacks and loggers that people use."""
    L.seed_everything(3, verbose=False)
    module = CASES["parameter_groups"]("sgd")
    checkpoint = ModelCheckpoint(f"{folder}/checkpoints", monitor="val_loss", save_top_k=2, save_last=True)
    trainer = trainer_for(
        strategy,
        num_ranks,
        max_epochs=4,
        logger=[CSVLogger(folder, "csv"), TensorBoardLogger(folder, "tensorboard")],
        enable_checkpointing=True,
        enable_progress_bar=True,
        enable_model_summary=True,
        log_every_n_steps=1,
        callbacks=[
            checkpoint,
            EarlyStopping("val_loss", mode="max", patience=1),
            LearningRateMonitor("step"),
        ],
    )
    trainer.fit(module, loader(num_ranks, 3), loader(num_ranks, 2))
    test = trainer.test(module, loader(num_ranks, 2), ckpt_path="best", verbose=False)
    return {
        "epochs": trainer.current_epoch,
        "best": Path(checkpoint.best_model_path).name,
        "score": float(checkpoint.best_model_score),
        "last": Path(checkpoint.last_model_path).name,
        "test": test,
        "rate": trainer.optimizers[0].param_groups[1]["lr"],
    }


def fast_dev_run(strategy: str, num_ranks: int) -> int:
    # Lightning puts its own logger, which does nothing, in the place of any.
    trainer = trainer_for(strategy, num_ranks, fast_dev_run=2, logger=True)
    trainer.fit(ByteGPT(), loader(num_ranks, 3), loader(num_ranks, 3))
    return trainer.global_step


def uneven_prediction(strategy: str, num_ranks: int, num_samples: int, batch_size: int) -> list[Tensor]:
    """This rank's predictions, a number for each sample, for two loaders."""

    class Module(ByteGPT):
        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
            return self(batch[0]).mean((1, 2))

    L.seed_everything(3, verbose=False)
    loaders = [DataLoader(data_of("byte_gpt", n, 1), batch_size=batch_size) for n in (num_samples, num_samples + 1)]
    predictions = trainer_for(strategy, num_ranks).predict(Module(), loaders)
    return [torch.cat(one) if one else torch.empty(0) for one in predictions]


def buffers_after_training(strategy: str, num_ranks: int) -> tuple[Weights, float]:
    """BatchNorm with running statistics: what rank 0 has, and how far this rank's model is from it in evaluation."""
    L.seed_everything(3, verbose=False)

    class Module(CASES["conv_net"]):  # type: ignore[misc]
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            """Statistics run."""

    module = Module("sgd")
    trainer = trainer_for(strategy, num_ranks)
    trainer.fit(module, loader(num_ranks, 4, "conv_net"), loader(num_ranks, 1, "conv_net"))
    mean = module.features[1].running_mean.clone()
    dist.broadcast(mean, 0)
    return full_state_dict(trainer), float((module.features[1].running_mean - mean).abs().max())

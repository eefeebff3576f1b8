"""What ranks do in tests of the lifecycle: functions that a pool can run on every rank."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_parallel
from lightning_parallel import build_strategy, full_state_dict
from tests.models.cases import CASES, GPT, VOCABULARY, ByteGPT, Case, data_of, loader_of, next_token_loss
from tests.parity import GLOBAL_BATCH, Recorder, make_trainer

Weights = dict[str, Tensor]

SHARING = ("cp_custom", "tp_custom", "fsdp_tp_custom", "pp_custom")
"""Names under which some ranks read the same samples; they have tests of their own."""


def loader(num_ranks: int, steps: int = 4, case: str = "byte_gpt") -> DataLoader[Any]:
    return loader_of(case, steps=steps, global_batch=GLOBAL_BATCH, num_ranks=num_ranks)


def trainer_for(strategy: str, num_ranks: int, **kwargs: Any) -> L.Trainer:
    return make_trainer("auto" if strategy == "auto" else build_strategy(strategy), num_ranks, **kwargs)


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
    trainer = trainer_for(strategy, num_ranks, fast_dev_run=2)
    trainer.fit(ByteGPT(), loader(num_ranks, 3), loader(num_ranks, 3))
    return trainer.global_step


def uneven_prediction(strategy: str, num_ranks: int, num_samples: int, batch_size: int) -> list[list[int]]:
    """The sizes of this rank's predictions, for two loaders."""

    class Module(ByteGPT):
        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
            return self(batch[0]).mean((1, 2))

    loaders = [DataLoader(data_of("byte_gpt", n, 1), batch_size=batch_size) for n in (num_samples, num_samples + 1)]
    predictions = trainer_for(strategy, num_ranks).predict(Module(), loaders)
    return [[len(batch) for batch in one] for one in predictions]


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


class OptimizerInInit(ByteGPT):
    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__(optimizer)
        self.made = super().configure_optimizers()

    def configure_optimizers(self) -> Any:
        return self.made


class Stranger(ByteGPT):
    """Trains a tensor that it did not register."""

    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__(optimizer)
        self.extra = [nn.Parameter(torch.zeros(3))]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.parameters(), *self.extra], lr=0.1)


def fit_module(make: Callable[[], L.LightningModule], strategy: str, num_ranks: int, **kwargs: Any) -> Weights:
    """Four steps of any module; its weights."""
    L.seed_everything(3, verbose=False)
    module = make()
    trainer = trainer_for(strategy, num_ranks, **kwargs)
    trainer.fit(module, loader(num_ranks))
    return full_state_dict(trainer)


def state_in_hooks(strategy: str, num_ranks: int) -> dict[str, Any]:
    """`full_state_dict` in the middle of training, while validation parameters may be gathered."""
    found: dict[str, Any] = {}

    class Look(Callback):
        def look(self, trainer: L.Trainer, name: str) -> None:
            found[name] = full_state_dict(trainer)

        def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
            self.look(trainer, "train")

        def on_validation_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
            self.look(trainer, "validation")

        def on_validation_epoch_end(self, trainer: L.Trainer, *args: Any) -> None:
            self.look(trainer, "validation end")

    L.seed_everything(3, verbose=False)
    module = CASES["hf_gpt2"]("sgd")
    trainer = trainer_for(strategy, num_ranks, callbacks=[Look()])
    trainer.fit(module, loader(num_ranks, 2), loader(num_ranks, 1))
    found["after"] = full_state_dict(trainer)
    return found


def accumulated(strategy: str, num_ranks: int, case: str, accumulate: int) -> Weights:
    """Two optimizer steps of `accumulate` microsteps each."""
    L.seed_everything(3, verbose=False)
    module = CASES[case]("sgd")
    batch = GLOBAL_BATCH // accumulate
    trainer = trainer_for(strategy, num_ranks, accumulate_grad_batches=accumulate)
    trainer.fit(module, loader_of(case, steps=2 * accumulate, global_batch=batch, num_ranks=num_ranks))
    return full_state_dict(trainer)


def unused_everywhere(strategy: str, num_ranks: int) -> Weights:
    """A head that no step uses: it keeps no gradient, and AdamW does not decay it."""

    class Module(ByteGPT):
        def __init__(self) -> None:
            super().__init__("adamw")
            self.unused = nn.Linear(4, 4)

    return fit_module(Module, strategy, num_ranks)


class RunsOnOneRank(Case):
    """A bias that only odd samples use, so that a rank may not use it in a step."""

    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__(optimizer)
        self.model = GPT()
        self.sometimes = nn.Linear(VOCABULARY, VOCABULARY)

    def loss(self, tokens: Tensor) -> Tensor:
        logits = self.model(tokens)
        if int(tokens[0, 0]) % 2:
            logits = logits + self.sometimes(logits)
        return next_token_loss(logits, tokens)


def used_on_one_rank(strategy: str, num_ranks: int) -> Weights:
    """Even tokens first on rank 0, odd ones on rank 1."""
    L.seed_everything(3, verbose=False)
    tokens = torch.randint(0, VOCABULARY, (8, 16), generator=torch.Generator().manual_seed(0))
    tokens[:, 0] = torch.arange(8) % 2
    module = RunsOnOneRank("sgd")
    trainer = trainer_for(strategy, num_ranks)
    trainer.fit(module, DataLoader(TensorDataset(tokens), batch_size=1))
    return full_state_dict(trainer)


class OneRowOnOneRank(ByteGPT):
    """A table that one rank uses, in a row whose shard lies on that rank: the other's shard of the gradient is zero."""

    def __init__(self) -> None:
        super().__init__("adamw")
        self.table = nn.Embedding(8, VOCABULARY)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self(batch[0])
        if self.global_rank == 1:
            logits = logits + self.table.weight[7]
        return next_token_loss(logits, batch[0])


def messages(function: Callable[..., Any], *args: Any) -> list[str]:
    """What the package refuses with on this rank."""
    try:
        function(*args)
    except lightning_parallel.ConfigurationError as error:
        return list(error.violations)
    return []


class Thawing(ByteGPT):
    """Trains the head alone, then everything, then all but the embeddings."""

    def __init__(self) -> None:
        super().__init__("adamw")
        self.gain = nn.Parameter(torch.tensor(1.0))
        self.requires_grad_(False)
        self.model.head.requires_grad_(True)

    def loss(self, tokens: Tensor) -> Tensor:
        return super().loss(tokens) * self.gain

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.requires_grad_(True)
        if batch_idx == 3:
            self.model.tokens.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4)


def half_precision(
    strategy: str, num_ranks: int, bad_rank: int | None, case: str = "byte_gpt"
) -> tuple[float, Weights]:
    """Four steps in fp16 with loss scaling, the second with an infinite loss on one rank; the scale afterwards."""
    L.seed_everything(3, verbose=False)

    class Module(CASES[case]):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            return loss * float("inf") if batch_idx == 1 and dist.get_rank() == bad_rank else loss

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    trainer = trainer_for(strategy, num_ranks, plugins=[plugin], gradient_clip_val=0.5)
    trainer.fit(Module("sgd"), loader(num_ranks, 4, case))
    return scaler.get_scale(), full_state_dict(trainer)


def scale_after(strategy: str, num_ranks: int, resume: str | None, save: str | None) -> float:
    """The loss scale after an epoch of four steps, that doubles after each four; resumed, after two epochs."""
    L.seed_everything(3, verbose=False)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=4)
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    trainer = trainer_for(strategy, num_ranks, plugins=[plugin], max_epochs=1 if resume is None else 2)
    trainer.fit(ByteGPT("sgd"), loader(num_ranks), ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
    return float(scaler.get_scale())


class FreeGAN(CASES["gan"]):  # type: ignore[misc]
    """Lightning clips no gradients by hand under loss scaling."""

    def clip_gradients(self, *args: Any, **kwargs: Any) -> None:
        """None."""


def scaled_gan(strategy: str, num_ranks: int) -> Weights:
    """Four steps in fp16 with loss scaling."""
    L.seed_everything(3, verbose=False)
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**4))
    trainer = trainer_for(strategy, num_ranks, plugins=[plugin])
    trainer.fit(FreeGAN("sgd"), loader(num_ranks, 4, "gan"))
    return full_state_dict(trainer)


def in_bf16(strategy: str, num_ranks: int, precision: str, case: str) -> list[float]:
    """The losses of four steps."""
    L.seed_everything(3, verbose=False)
    recorder = Recorder()
    trainer = trainer_for(strategy, num_ranks, precision=precision, callbacks=[recorder])
    trainer.fit(CASES[case]("sgd"), loader(num_ranks, 4, case))
    return recorder.outcome.losses


class KeptInAList(ByteGPT):
    def __init__(self) -> None:
        super().__init__()
        self.penalised = [self.model.head.weight]


class WithParameterHook(ByteGPT):
    def __init__(self) -> None:
        super().__init__()
        self.model.head.weight.register_hook(lambda gradient: gradient * 2)


class SparseTable(ByteGPT):
    def __init__(self) -> None:
        super().__init__()
        self.model.tokens = nn.Embedding(VOCABULARY, 16, sparse=True)


class WithLBFGS(ByteGPT):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class WritesInTheStep(ByteGPT):
    """A target network in the manner of BYOL, updated where it is used."""

    def __init__(self) -> None:
        super().__init__()
        self.target = nn.Linear(VOCABULARY, VOCABULARY).requires_grad_(False)

    def loss(self, tokens: Tensor) -> Tensor:
        with torch.no_grad():
            self.target.weight.mul_(0.9)
        return super().loss(tokens)


class WritesAfterValidation(ByteGPT):
    def on_validation_batch_end(self, *args: Any) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(0.9)

    on_validation_epoch_end = on_validation_end = on_validation_batch_end


class BuiltAfterChance(ByteGPT):
    """Draws random numbers before the model is built, in `setup` and in `configure_model`."""

    def __init__(self) -> None:
        super().__init__("adamw")
        self.first = nn.Linear(4, 4)

    def setup(self, stage: str) -> None:
        if not hasattr(self, "second"):
            self.second = nn.Linear(4, 4)

    def configure_model(self) -> None:
        if not hasattr(self, "third"):
            self.third = nn.Linear(4, 4)

    def loss(self, tokens: Tensor) -> Tensor:
        x = torch.ones(1, 4)
        return super().loss(tokens) + (self.first(x) + self.second(x) + self.third(x)).pow(2).mean()


def fit_and_validate(make: Callable[[], L.LightningModule], strategy: str, num_ranks: int) -> Weights:
    """Four steps with validation in between; the weights."""
    L.seed_everything(3, verbose=False)
    trainer = trainer_for(strategy, num_ranks, val_check_interval=2)
    trainer.fit(make(), loader(num_ranks), loader(num_ranks, 1))
    return full_state_dict(trainer)


def averaging(strategy: str, num_ranks: int) -> None:
    from lightning.pytorch.callbacks import StochasticWeightAveraging

    trainer_for(strategy, num_ranks, callbacks=[StochasticWeightAveraging(0.1)]).fit(ByteGPT(), loader(num_ranks))


def note_of(make: Callable[[], L.LightningModule], strategy: str, num_ranks: int) -> str:
    """The error of a fit, with its notes."""
    try:
        fit_module(make, strategy, num_ranks)
    except Exception as error:
        return "\n".join([str(error), *getattr(error, "__notes__", [])])
    return ""


class PenaltyInTheLoss(ByteGPT):
    def loss(self, tokens: Tensor) -> Tensor:
        return super().loss(tokens) + 1e-3 * sum(p.pow(2).sum() for p in self.parameters())


def too_large_to_be_whole(num_ranks: int, path: str) -> dict[str, Any]:
    """A module that stays sharded after `fit`: what still works with it, and what is refused."""
    L.seed_everything(3, verbose=False)
    module = ByteGPT("adamw")
    with mock.patch("lightning_parallel.strategies.parallel_module.host_memory", return_value=1):
        trainer = trainer_for("fsdp_custom", num_ranks)
        trainer.fit(module, loader(num_ranks))
        found: dict[str, Any] = {"first": full_state_dict(trainer)}
        trainer.save_checkpoint(path)
        found["sharded"] = type(module).__name__
        validated = trainer_for("fsdp_custom", num_ranks)
        found["validated"] = validated.validate(module, loader(num_ranks, 1), verbose=False)
        others = ("ddp_custom", "zero2_custom", "tp_custom", "fsdp_custom:recompute=full")
        found["refused"] = {name: messages(trainer_for(name, num_ranks).fit, module, loader(1)) for name in others}
    again = trainer_for("fsdp_custom", num_ranks)
    again.fit(module, loader(num_ranks))
    found["second"] = full_state_dict(again)
    found["plain"] = type(module).__name__
    return found

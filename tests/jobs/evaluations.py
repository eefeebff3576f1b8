"""Evaluation of data whose number of samples ranks do not divide."""

from __future__ import annotations

import warnings
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, Subset
from torchmetrics import CatMetric, SumMetric

from tests.data import data_of
from tests.models.pipelined import DeepTied
from tests.names import num_readers
from tests.parity import trainer_for

GLOBAL = 8
"""Samples in a batch of all ranks."""


class Evaluated(DeepTied):
    """Logs a mean, counts samples and keeps a value of each, in two ways: in a metric and by a gather.

    Args:
        gathers: ``"end"`` collects values in a list and gathers them at the end, ``"step"`` in each step, ``"all"``
            what cannot be gathered.
    """

    def __init__(self, gathers: str = "") -> None:
        super().__init__("sgd")
        self.gathers = gathers
        self.count, self.values = SumMetric(), CatMetric()
        self.own: list[Tensor] = []
        self.gathered: Tensor | None = None
        self.counted = 0.0
        self.kept: list[float] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        tokens = batch[0]
        logits = self(tokens)
        self.log("logits", logits.square().mean(), sync_dist=True, batch_size=len(tokens))
        self.log("value", tokens.float().mean(), sync_dist=True)
        self.count.update(len(tokens))
        rows = tokens.float().mean(1)
        self.values.update(rows)
        self.own.append(rows)
        if self.gathers == "step":
            self.all_gather(rows)

    def on_validation_epoch_end(self) -> None:
        rows = torch.cat(self.own)
        if self.gathers == "all":
            self.all_gather(rows.unsqueeze(0))
        if self.gathers == "end":
            self.gathered = self.all_gather(rows)
        self.own.clear()
        self.counted, self.kept = float(self.count.compute()), self.values.compute().tolist()
        self.count.reset()
        self.values.reset()

    def predict_step(self, batch: Any, batch_idx: int) -> None:
        self.own.append(batch[0].float().mean(1))

    def on_predict_epoch_end(self) -> None:
        self.gathered = self.all_gather(torch.cat(self.own))

    test_step = validation_step
    on_test_epoch_end = on_validation_epoch_end


class Pairs:
    """A batch sampler of one's own, which says that it has as many batches as it likes."""

    def __init__(self, num_samples: int, said: int = 0) -> None:
        self.batches = [list(range(start, min(start + 2, num_samples))) for start in range(0, num_samples, 2)]
        self.said = said or len(self.batches)

    def __iter__(self) -> Any:
        return iter(self.batches)

    def __len__(self) -> int:
        return self.said


def loader_of(kind: str, num_samples: int, batch_size: int) -> DataLoader[Any]:
    data = Subset(data_of("byte_gpt", 64, 1), range(num_samples))
    if kind == "batch sampler":
        return DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), batch_size, drop_last=False))
    if kind in ("own", "lying"):
        return DataLoader(data, batch_sampler=Pairs(num_samples, 21 if kind == "lying" else 0))  # type: ignore[arg-type]
    return DataLoader(data, batch_size, drop_last=kind == "drop_last", shuffle=kind == "shuffled")


def evaluated(
    strategy: str,
    num_ranks: int,
    kind: str,
    num_samples: int,
    *,
    entry: str = "validate",
    gathers: str = "",
    readers: int = 0,
) -> tuple[dict[str, float], list[float], list[float], list[str]]:
    """Logged values, values of samples in a metric, gathered ones, and warnings."""
    L.seed_everything(3, verbose=False)
    module = Evaluated(gathers)
    readers = readers or (num_readers(strategy, num_ranks) if num_ranks > 1 else 1)
    trainer = trainer_for(strategy, num_ranks, max_epochs=1, num_sanity_val_steps=2)
    loader = loader_of(kind, num_samples, GLOBAL // readers)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        if entry == "fit":
            trainer.fit(module, loader_of("", 16, GLOBAL // readers), loader)
        else:
            getattr(trainer, entry)(module, loader, verbose=False)
    logged = {name: float(value) for name, value in trainer.callback_metrics.items() if name in ("logits", "value")}
    gathered = [] if module.gathered is None else module.gathered.flatten().tolist()
    words = [str(each.message) for each in told if "count twice" in str(each.message)]
    return logged | {"count": module.counted}, module.kept, gathered, words


def predicted(strategy: str, num_ranks: int, num_samples: int) -> list[float]:
    """Values of predictions that a hook gathers at the end."""
    module = Evaluated()
    trainer = trainer_for(strategy, num_ranks)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.predict(module, loader_of("", num_samples, GLOBAL // 2), return_predictions=False)
    assert module.gathered is not None
    return module.gathered.flatten().tolist()

"""Metrics in every place where people update them: what each counts, in one process and on ranks."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import CatMetric, MeanMetric, Metric, MetricCollection, MinMetric, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassRecall

from tests.data import GLOBAL_BATCH, data_of
from tests.models.cases import VOCABULARY, next_token_loss
from tests.models.pipelined import DeepTied
from tests.parity import trainer_for

SAMPLES = 5 * GLOBAL_BATCH


class Entries(Metric):
    """Rows, kept apart: a list that is gathered and not joined."""

    rows: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("rows", [], dist_reduce_fx=None)

    def update(self, row: Tensor) -> None:
        self.rows.append(row.sum().reshape(1))

    def compute(self) -> Tensor:
        return torch.cat([row.reshape(-1) for row in self.rows]).sum()


class Counts(DeepTied):
    """Updates metrics before the stack, after it, and in hooks."""

    def __init__(self) -> None:
        super().__init__("adamw")
        self.before, self.after, self.in_hook, self.logged = SumMetric(), SumMetric(), SumMetric(), SumMetric()
        self.mean, self.least, self.rows, self.anew = MeanMetric(), MinMetric(), CatMetric(), SumMetric()
        self.apart = Entries()
        self.both = nn.ModuleDict({f"{name}_": self._collection(name) for name in ("train", "validation")})
        self.plain: dict[str, list[Metric]] = {"all": [SumMetric(), MeanMetric()]}
        self.asked_later, self.in_hook_later = SumMetric(), SumMetric()
        self.found: dict[str, float] = {}
        self.steps: list[float] = []

    @staticmethod
    def _collection(name: str) -> MetricCollection:
        """Two metrics with equal states, of which torchmetrics updates one only."""
        return MetricCollection([MulticlassAccuracy(VOCABULARY), MulticlassRecall(VOCABULARY)], prefix=f"{name}_")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._step(batch, "train")

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._step(batch, "validation")

    def test_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._step(batch, "validation")

    def _step(self, batch: Any, name: str) -> Tensor:
        tokens, count = batch[0], float(len(batch[0]))
        self.before.update(count)
        self.anew.update(count)
        self.asked_later.update(count)
        self.plain["all"][0].update(count)
        self.log("count_before", count, on_epoch=True, on_step=False, reduce_fx="sum", sync_dist=True)
        logits = self(tokens)
        loss = next_token_loss(logits, tokens)
        self.after.update(torch.ones(len(tokens)))
        self.mean.update(loss, weight=count)
        self.plain["all"][1](loss.detach(), weight=count)
        for row in logits.detach().mean((1, 2)):
            self.rows.update(row)
            self.least.update(row)
            self.apart.update(row)
        self.both[f"{name}_"].update(logits[:, :-1].reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1))
        self.logged(count)
        self.log("logged", self.logged, on_epoch=True, on_step=False)
        self.log_dict(self.both[f"{name}_"], on_epoch=True, on_step=False)
        self.log("count_after", count, on_epoch=True, on_step=False, reduce_fx="sum", sync_dist=True)
        self.log("step_loss", loss, on_epoch=True, on_step=False, sync_dist=True)
        return loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.anew.reset()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._hook(batch)

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._hook(batch)
        self.log("count_hook", float(len(batch[0])), on_epoch=True, on_step=False, reduce_fx="sum", sync_dist=True)

    def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._hook(batch)

    def _hook(self, batch: Any) -> None:
        self.in_hook_later.update(float(len(batch[0])))
        self.in_hook.update(float(len(batch[0])))
        self.steps.append(float(self.anew.compute()))
        self.anew.reset()

    def on_train_epoch_end(self) -> None:
        self._end("train")

    def on_validation_epoch_end(self) -> None:
        self._end("validation")

    def on_test_epoch_end(self) -> None:
        self._end("test")

    def _end(self, name: str) -> None:
        metrics = {"before": self.before, "after": self.after, "in_hook": self.in_hook, "mean": self.mean}
        metrics |= {"least": self.least, "apart": self.apart, "plain": self.plain["all"][0]}
        metrics |= {"plain_mean": self.plain["all"][1]}
        for key, metric in metrics.items():
            self.found[f"{name}_{key}"] = float(metric.compute())
            metric.reset()
        rows = self.rows.compute()
        self.found |= {f"{name}_num_rows": float(len(rows)), f"{name}_spread": float(rows.std())}
        self.rows.reset()


class CountsOutside(L.Callback):
    """A callback with a metric of its own."""

    def __init__(self) -> None:
        self.count = SumMetric()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.count.update(float(len(batch[0])))

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        module.found["outside"] = float(self.count.compute())


def counted(strategy: str, num_ranks: int, num_readers: int) -> dict[str, Any]:
    """Fit, validate and test: everything that the module has counted."""
    L.seed_everything(3, verbose=False)
    module = Counts()
    data = data_of("byte_gpt", SAMPLES, GLOBAL_BATCH)
    loader = DataLoader(data, batch_size=GLOBAL_BATCH // num_readers)
    outside = CountsOutside()
    trainer = trainer_for(strategy, num_ranks, callbacks=[outside])
    trainer.fit(module, loader)
    of_script = {"outside": outside.count, "step": module.asked_later, "hook": module.in_hook_later}
    module.found |= {f"{name}_after_fit": float(metric.compute()) for name, metric in of_script.items()}
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    logged |= trainer.validate(module, loader, verbose=False)[0]
    module.found |= {f"{name}_after_validate": float(metric.compute()) for name, metric in of_script.items()}
    tested = trainer.test(module, loader, verbose=False)[0]
    return {"found": module.found, "logged": logged, "tested": tested, "steps": module.steps}

"""Batches that no pipeline cuts into microbatches, as those of graphs: stages take turns."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tests.data import GLOBAL_BATCH, data_of
from tests.jobs.first_steps import said
from tests.models.cases import VOCABULARY, ByteGPT
from tests.parity import TOLERANCE, Outcome, checked, is_moving, once, train_module, trainer_for, worst

STEPS = 3
TURNS = "pipeline stages take turns from here on"


class Graph:
    """Holds tensors of all samples, and is no container that others look into, as `torch_geometric.data.Batch`."""

    def __init__(self, tokens: Tensor) -> None:
        self.tokens = tokens

    def to(self, device: Any) -> Graph:
        return Graph(self.tokens.to(device))


class TakesGraphs(ByteGPT):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step([batch.tokens], batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch.tokens), batch_size=GLOBAL_BATCH)


class TakesGraphsAndWeights(ByteGPT):
    """Has a tensor with an entry for each graph, too, which is cut."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        graph, weights = batch
        loss = self.loss(graph.tokens * weights[:, None] % VOCABULARY)
        self.log("train_loss", loss)
        return loss


def collated(rows: Any) -> Graph:
    return Graph(torch.stack([row for (row,) in rows]))


def collated_with_weights(rows: Any) -> tuple[Graph, Tensor]:
    return collated(rows), torch.arange(1, len(rows) + 1)


def loader(*, weighted: bool = False) -> DataLoader[Any]:
    data = data_of("byte_gpt", STEPS * GLOBAL_BATCH, GLOBAL_BATCH)
    return DataLoader(data, GLOBAL_BATCH, collate_fn=collated_with_weights if weighted else collated)


def trained(strategy: str, num_ranks: int, weighted: bool) -> tuple[Outcome, list[str]]:
    """What came of it, and what was said of turns."""
    make: Any = TakesGraphsAndWeights if weighted else TakesGraphs
    with said("") as lines:
        outcome = train_module(make, loader(weighted=weighted), strategy, num_ranks)
    return outcome, [line for line in lines if TURNS in line]


@pytest.mark.parametrize(
    ("weighted", "reason"),
    [
        (False, "a batch (Graph) has no tensor with samples along its first dimension"),
        (True, "training_step fails on a microbatch, of which Graph is that of the whole batch (RuntimeError: "),
    ],
    ids=["alone", "weighted"],
)
@pytest.mark.parametrize("strategy", ["pp_custom", "pp_custom:schedule=turns"], ids=["told", "asked"])
def test_as_one_process(ranks: Any, strategy: str, weighted: bool, reason: str) -> None:
    expected, _ = once(trained, "auto", 1, weighted)
    assert is_moving(expected)
    found, told = ranks(2).run(trained, checked(strategy), 2, weighted)[0]
    assert worst(found, expected) <= TOLERANCE
    assert len(told) == (strategy == "pp_custom")
    assert told == [] or told[0].startswith(reason)


def validated(strategy: str, num_ranks: int) -> list[float]:
    """Losses of the validation before training, in it, and by itself."""
    L.seed_everything(3, verbose=False)
    module, trainer = TakesGraphs(), trainer_for(strategy, num_ranks, num_sanity_val_steps=1)
    trainer.validate(module, loader(), verbose=False)
    found = [float(trainer.callback_metrics["val_loss"])]
    trainer.fit(module, loader(), loader())
    return [*found, float(trainer.callback_metrics["val_loss"])]


def test_evaluation(ranks: Any) -> None:
    assert ranks(2).run(validated, "pp_custom", 2)[0] == pytest.approx(once(validated, "auto", 1), rel=1e-5)

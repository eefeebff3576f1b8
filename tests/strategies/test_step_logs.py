"""What steps log under a pipeline: values of microbatches become those of the batch, weighted as the user says."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from lightning_parallel.strategies.step_logs import StepLogs
from tests.data import batches
from tests.models.cases import next_token_loss
from tests.models.pipelined import Deep
from tests.parity import TOLERANCE, trainer_for


def test_values_are_weighted_with_the_batch_sizes_of_microbatches() -> None:
    module = L.LightningModule()
    logs = StepLogs(module)
    for microbatch, (value, size) in enumerate([(1.0, 1), (4.0, 3)]):
        with logs.of(microbatch):
            module.log("weighted", torch.tensor(value), batch_size=size)
            module.log("plain", value)
            module.log("most", value, reduce_fx="max", batch_size=size)
    weighted, plain, most = logs.collected()
    assert (float(weighted.value), weighted.kwargs["batch_size"]) == (3.25, 4)
    assert (float(plain.value), "batch_size" in plain.kwargs) == (2.5, False)
    assert (float(most.value), most.kwargs["batch_size"]) == (4.0, 4)


class Uneven(Deep):
    """Logs means over numbers of tokens that differ from sample to sample, and says over how many."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (tokens,) = batch
        logits = self(tokens)
        counts = tokens < 3 + tokens[:, :1] % 23
        counts[:, 0] = True
        values = logits.logsumexp(-1)[counts]
        self.log("mean", values.mean(), on_step=True, on_epoch=True, batch_size=int(counts.sum()))
        return next_token_loss(logits, tokens)


def logged(strategy: str, num_ranks: int) -> dict[str, float]:
    L.seed_everything(3, verbose=False)
    trainer = trainer_for(strategy, num_ranks)
    trainer.fit(Uneven(), batches("byte_gpt", 1))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def test_means_over_unequal_numbers_are_those_of_one_process(ranks: Any) -> None:
    expected = logged("auto", 1)
    assert {"mean_step", "mean_epoch"} <= expected.keys()
    for found in ranks(2).run(logged, "pp_custom", 2):
        assert found == pytest.approx(expected, abs=TOLERANCE)

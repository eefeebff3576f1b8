"""SIGTERM: all ranks end behind the same step, with a checkpoint and a status that schedulers understand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.data import loader
from tests.jobs.stops import module, resumed, stopped, stopped_often
from tests.parity import TOLERANCE, difference, trainer_for

NAMES = ["ddp_custom", "fsdp_custom", "tp_custom", "pp_custom"]


@pytest.mark.parametrize("name", NAMES)
def test_a_signal_to_all_ranks(name: str, ranks: Any, tmp_path: Path) -> None:
    first, second = ranks(2).run(stopped_often, name, tmp_path, 5)
    assert first == second
    for stop in first:
        assert stop.status == 143
        assert 0 < stop.step < 400
        assert stop.num_threads == 0
        assert torch.load(stop.path, weights_only=False)["global_step"] == stop.step


@pytest.mark.parametrize(("name", "rank"), [("ddp_custom", 1), ("pp_custom", 0)])
def test_a_signal_to_one_rank(name: str, rank: int, ranks: Any, tmp_path: Path) -> None:
    first, second = ranks(2).run(stopped, name, tmp_path, [rank])
    assert first == second
    assert (first.status, Path(first.path).name) == (143, "last.ckpt")


@pytest.mark.parametrize("name", NAMES)
def test_the_run_goes_on(name: str, ranks: Any, tmp_path: Path) -> None:
    """What is saved are the weights of one process after as many updates, and `last` goes on from there."""
    stop, _ = ranks(2).run(stopped, name, tmp_path, [0, 1])
    trainer = trainer_for("auto", 1, max_steps=stop.step)
    trainer.fit(alone := module(), loader(1, 400))
    saved = torch.load(stop.path, weights_only=False)["state_dict"]
    # Rounding adds up with the updates: a few 1e-7 for each of up to some dozens.
    assert difference(saved, dict(alone.state_dict())) <= 10 * TOLERANCE
    assert ranks(2).run(resumed, name, tmp_path, 2, stop.step + 3) == [stop.step + 3] * 2


def test_an_accumulation_window_is_not_left(ranks: Any, tmp_path: Path) -> None:
    for stop in ranks(2).run(stopped, "fsdp_custom", tmp_path, [0, 1], accumulate_grad_batches=3):
        saved = torch.load(stop.path, weights_only=False)
        ready = saved["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]["ready"]
        assert (stop.status, ready) == (143, 3 * stop.step)


def test_the_status_is_the_one_asked_for(ranks: Any, tmp_path: Path) -> None:
    for stop in ranks(2).run(stopped, "ddp_custom:stop_status=75", tmp_path, [0, 1]):
        assert stop.status == 75

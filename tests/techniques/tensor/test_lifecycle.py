"""Tensor parallel around the steps: entry points, checkpoints, random numbers, the module afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lightning_parallel import build_strategy, full_state_dict
from tests.data import STEPS, batches
from tests.jobs.lifecycle import marks
from tests.jobs.sharing import counted, lifecycle
from tests.models.cases import CASES
from tests.models.layered import DropoutBlock, Hard
from tests.models.tables import TENSOR_MODULES
from tests.parity import TOLERANCE, Recorder, difference, make_trainer


@pytest.mark.parametrize(("strategy", "size", "readers"), [("tp_custom", 2, 1), ("fsdp_tp_custom", 4, 2)])
def test_every_entry_point(ranks: Any, strategy: str, size: int, readers: int) -> None:
    expected = lifecycle("auto", 1, 1)
    for index, ours in enumerate(ranks(size).run(lifecycle, strategy, size, readers)):
        for name in ("before", "test"):
            assert ours[name][0] == pytest.approx(expected[name][0], abs=TOLERANCE)
        if readers == 1:
            assert ours["during"] == pytest.approx(expected["during"], abs=TOLERANCE)
            assert torch.allclose(ours["predictions"], expected["predictions"], atol=TOLERANCE)
        assert ours["norms"] == pytest.approx(expected["norms"], abs=TOLERANCE), index
        assert ours["plain"]


def save(strategy: str, num_ranks: int, num_readers: int, path: str) -> dict[str, Tensor]:
    """Two epochs, with a checkpoint after the first."""
    L.seed_everything(3, verbose=False)

    class Save(Callback):
        def on_train_epoch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.current_epoch == 0:
                trainer.save_checkpoint(path)

    return _two_epochs(strategy, num_ranks, num_readers, callbacks=[Save()])


def resume(strategy: str, num_ranks: int, num_readers: int, path: str) -> dict[str, Tensor]:
    """The second epoch, from other weights."""
    L.seed_everything(11, verbose=False)
    return _two_epochs(strategy, num_ranks, num_readers, path)


def _two_epochs(strategy: str, num_ranks: int, readers: int, path: str | None = None, **kwargs: Any) -> Any:
    built = strategy if strategy == "auto" else build_strategy(strategy)
    trainer = make_trainer(built, num_ranks, max_epochs=2, gradient_clip_val=0.5, **kwargs)
    trainer.fit(CASES["parameter_groups"]("adamw"), batches("parameter_groups", readers, 3), ckpt_path=path)
    return full_state_dict(trainer)


def test_checkpoints_resume_under_other_names(ranks: Any, tmp_path: Path) -> None:
    uninterrupted = save("auto", 1, 1, str(tmp_path / "plain"))
    ours = ranks(2).run(save, "tp_custom", 2, 1, str(tmp_path / "tp"))[0]
    assert difference(ours, uninterrupted) < TOLERANCE
    assert difference(resume("auto", 1, 1, str(tmp_path / "tp")), uninterrupted) < TOLERANCE
    for name, size, readers, path in (
        ("tp_custom", 2, 1, "plain"),
        ("fsdp_custom", 2, 2, "tp"),
        ("tp_custom", 2, 1, "tp"),
        ("fsdp_tp_custom", 4, 2, "tp"),
    ):
        resumed = ranks(size).run(resume, name, size, readers, str(tmp_path / path))[0]
        assert difference(resumed, uninterrupted) < TOLERANCE, name


def plain_again(case: str) -> dict[str, Any]:
    """A module after fit, and after another under another strategy."""
    L.seed_everything(3, verbose=False)
    module, untouched = TENSOR_MODULES[case]("adamw"), TENSOR_MODULES[case]("adamw")
    objects = list(module.parameters())
    trainer = make_trainer(build_strategy("tp_custom"), 2)
    trainer.fit(module, batches(case, 1, 2))
    whole = full_state_dict(trainer)
    found = {
        "marks": [a for a, b in zip(marks(module), marks(untouched), strict=True) if a != b],
        "same objects": all(a is b for a, b in zip(module.parameters(), objects, strict=True)),
        "difference": difference(module.state_dict(), whole) if whole else 0.0,
        "loss": float(module.loss(next(iter(batches(case, 1)))[0]).detach()),
    }
    make_trainer(build_strategy("fsdp_custom"), 2).fit(module, batches(case, 2, 1))
    return found


@pytest.mark.parametrize("case", ["hard", "demo", "hf_gpt2", "encoder"])
def test_the_module_is_plain_again(ranks: Any, case: str) -> None:
    first, second = ranks(2).run(plain_again, case)
    for found in (first, second):
        assert found["marks"] == []
        assert found["same objects"]
        assert found["difference"] == 0.0
    assert first["loss"] == second["loss"]


@pytest.mark.parametrize(("strategy", "readers"), [("fsdp_tp_custom", 2), ("hsdp_custom:replicate=2,tensor=2", 2)])
def test_ranks_that_share_samples_count_once(ranks: Any, strategy: str, readers: int) -> None:
    assert ranks(4).run(counted, strategy, 4, readers) == [STEPS * 8] * 4


class WithDropout(Hard):
    """Notes what comes out of the last layer."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer, make=DropoutBlock)
        self.noted: list[Tensor] = []
        self.blocks[-1].register_forward_hook(lambda module, inputs, output: self.noted.append(output.detach()))


def with_dropout(strategy: str) -> tuple[Tensor, list[float]]:
    L.seed_everything(3, verbose=False)
    recorder, module = Recorder(), WithDropout()
    make_trainer(build_strategy(strategy), 2, callbacks=[recorder]).fit(module, batches("hard", 1))
    return torch.stack(module.noted[-STEPS:]), recorder.outcome.losses


@pytest.mark.parametrize("strategy", ["tp_custom", "tp_custom:recompute=full"])
def test_dropout_of_hidden_states_is_equal_on_peers(ranks: Any, strategy: str) -> None:
    (first, losses), (second, _) = ranks(2).run(with_dropout, strategy)
    assert torch.equal(first, second)
    assert len(losses) == STEPS
    assert all(loss < 10 for loss in losses)


def seeded_by_rank(strategy: str) -> dict[str, Tensor]:
    torch.manual_seed(dist.get_rank())
    recorder = Recorder()
    make_trainer(build_strategy(strategy), 2, callbacks=[recorder]).fit(Hard(), batches("hard", 1, 1))
    return recorder.outcome.initial


def test_ranks_start_from_the_weights_of_the_first(ranks: Any) -> None:
    torch.manual_seed(0)
    assert difference(ranks(2).run(seeded_by_rank, "tp_custom")[0], Hard().state_dict()) == 0.0

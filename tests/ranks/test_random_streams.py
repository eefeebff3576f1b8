"""Random numbers: in steps different on ranks that read different samples, and the same again on resume."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.distributed.tensor import _random

from lightning_parallel import _torch, full_state_dict
from lightning_parallel.ranks.random_streams import RandomState, data_rank_stream
from lightning_parallel.strategies import parallel_module
from tests.data import loader
from tests.models.cases import ByteGPT, next_token_loss
from tests.parity import difference, trainer_for

NAMES = ["ddp_custom", "zero1_custom", "zero2_custom", "fsdp_custom"]


class WithDropout(ByteGPT):
    """Notes the mask of each step."""

    def __init__(self) -> None:
        super().__init__("adamw")
        self.masks: list[Tensor] = []

    def loss(self, tokens: Tensor) -> Tensor:
        mask = torch.nn.functional.dropout(torch.ones(tokens.shape[1]), 0.5)
        self.masks.append(mask)
        return next_token_loss(self.model(tokens) * mask[:, None], tokens)


class SaveAt(Callback):
    """Saves after a step, in one of the hooks in which people do."""

    def __init__(self, path: str, step: int, hook: str) -> None:
        self.path, self.step = path, step
        setattr(self, hook, self.save)

    def save(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def fit(
    strategy: str, num_ranks: int, path: str, step: int, *, resumes: bool, hook: str = "on_train_batch_end"
) -> dict[str, Any]:
    """Two epochs of four steps; or from the checkpoint of a step, with other numbers before."""
    L.seed_everything(11 if resumes else 3, verbose=False)
    module = WithDropout()
    trainer = trainer_for(strategy, num_ranks, max_epochs=2, callbacks=[] if resumes else [SaveAt(path, step, hook)])
    validation = loader(num_ranks, 2) if hook == "on_validation_end" else None
    trainer.fit(module, loader(num_ranks), validation, ckpt_path=path if resumes else None)
    return {"weights": full_state_dict(trainer), "masks": torch.stack(module.masks)}


@pytest.mark.parametrize("step", [2, 4, 6])
@pytest.mark.parametrize("name", NAMES)
def test_masks_differ_over_ranks_and_go_on_after_resume(ranks: Any, name: str, step: int, tmp_path: Path) -> None:
    path = str(tmp_path / "middle.ckpt")
    whole = ranks(2).run(fit, name, 2, path, step, resumes=False)
    assert not torch.equal(whole[0]["masks"], whole[1]["masks"])
    resumed = ranks(2).run(fit, name, 2, path, step, resumes=True)
    for ours, theirs in zip(resumed, whole, strict=True):
        assert torch.equal(ours["masks"], theirs["masks"][step:])
    assert difference(resumed[0]["weights"], whole[0]["weights"]) == 0


@pytest.mark.parametrize("hook", ["on_train_epoch_end", "on_validation_end"])
def test_checkpoints_at_the_end_of_an_epoch(ranks: Any, hook: str, tmp_path: Path) -> None:
    path = str(tmp_path / "end.ckpt")
    whole = ranks(2).run(fit, "fsdp_custom", 2, path, 4, resumes=False, hook=hook)
    resumed = ranks(2).run(fit, "fsdp_custom", 2, path, 4, resumes=True, hook=hook)
    assert difference(resumed[0]["weights"], whole[0]["weights"]) == 0


def test_resume_with_other_ranks_is_reproducible(ranks: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "middle.ckpt")
    whole = ranks(2).run(fit, "fsdp_custom", 2, path, 4, resumes=False)
    first = ranks(4).run(fit, "fsdp_custom", 4, path, 4, resumes=True)
    second = ranks(4).run(fit, "ddp_custom", 4, path, 4, resumes=True)
    assert all(torch.equal(a["masks"], b["masks"]) for a, b in zip(first, second, strict=True))
    assert len({tuple(result["masks"].flatten().tolist()) for result in first}) == 4
    masks = {tuple(mask.tolist()) for result in (*whole, *first) for mask in result["masks"]}
    assert len(masks) == 2 * 8 + 4 * 4  # streams that begin anew do not repeat those of the first run
    assert difference(first[0]["weights"], second[0]["weights"]) < 1e-5
    one = fit("auto", 1, path, 4, resumes=True)  # plain Lightning reads it, too
    assert one["weights"].keys() == first[0]["weights"].keys()


def test_states_are_restored() -> None:
    host = torch.device("cpu")
    for state in (RandomState.take(host), RandomState.from_plain(RandomState.take(host).to_plain())):
        first = draws()
        state.restore(host)
        assert draws() == first
        state.restore(host)


def draws() -> tuple[Any, ...]:
    return torch.rand(3).tolist(), random.random(), np.random.rand(), np.random.randn()


def test_streams_do_not_meet() -> None:
    drawn = set()
    for seed in (0, 1):
        torch.manual_seed(seed)
        first = torch.get_rng_state()
        for rank, progress in itertools.product(range(3), (0, 4)):
            own = data_rank_stream(rank, progress=progress, device=torch.device("cpu"))
            assert torch.equal(torch.get_rng_state(), first)
            own.restore(torch.device("cpu"))
            drawn.add(float(torch.rand(())))
            torch.manual_seed(seed)
    assert len(drawn) == 12


class DrawsInHooks(WithDropout):
    """Makes weights anew in a hook, and its loaders and splits from the shared stream."""

    def on_train_epoch_start(self) -> None:
        with torch.no_grad():
            torch.nn.init.normal_(self.model.head.bias if self.model.head.bias is not None else self.model.norm.bias)

    def setup(self, stage: str) -> None:
        self.split = torch.randperm(8).tolist()


def fit_twice_with_hooks(strategy: str) -> tuple[list[float], list[int]]:
    """What a rank has after two fits: the sums of its weights, and its second split."""
    L.seed_everything(3, verbose=False)
    module = DrawsInHooks()
    for _ in range(2):
        trainer_for(strategy, 2, max_epochs=2).fit(module, loader(2))
    return [float(p.detach().sum()) for p in module.parameters()], module.split


@pytest.mark.parametrize("name", ["ddp_custom", "zero1_custom"])
def test_hooks_draw_alike_on_all_ranks(ranks: Any, name: str) -> None:
    first, second = ranks(2).run(fit_twice_with_hooks, name)
    assert first == second


# Of DTensors ------------------------------------------------------------------------------------------------------


def test_dtensors_draw_from_the_generator_of_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made by torch, at the first draw, the tracker gives every rank the state of rank 0."""
    state = SimpleNamespace(to=lambda device: state)
    calls: dict[str, Any] = {"is_available": lambda: True, "device_count": lambda: 1, "get_rng_state": lambda: state}
    monkeypatch.setattr(torch, "xla", SimpleNamespace(**calls, set_rng_state=mock.Mock()), raising=False)
    mesh: Any = SimpleNamespace(device_type="xla", get_rank=lambda: 0)
    with mock.patch.object(torch.distributed, "broadcast") as broadcast:
        with _torch.random_states.states_of_ranks(mesh):
            tracker = _random._rng_tracker
            assert isinstance(tracker, _random.OffsetBasedRNGTracker)
            with _torch.random_states.states_of_ranks(mesh):
                assert _random._rng_tracker is tracker
            assert _random._rng_tracker is tracker
        assert _random._rng_tracker is None
        broadcast.assert_not_called()


def when_states_are_those_of_ranks(strategy: str) -> list[str]:
    noted: list[str] = []

    @contextlib.contextmanager
    def states_of_ranks(mesh: Any) -> Iterator[None]:
        noted.append(f"begin on {mesh.size()}")
        with original(mesh):  # on the host, torch can make no tracker
            assert _random._rng_tracker is None
            yield
        noted.append("end")

    def parallelize(*args: Any) -> Any:
        noted.append("parallelize")
        return parallel(*args)

    class Module(ByteGPT):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            noted.append("step")
            return super().training_step(batch, batch_idx)

    original, parallel = _torch.random_states.states_of_ranks, parallel_module.parallelize
    with (
        mock.patch.object(_torch.random_states, "states_of_ranks", states_of_ranks),
        mock.patch.object(parallel_module, "parallelize", parallelize),
    ):
        trainer_for(strategy, 2, max_steps=1).fit(Module(), loader(2, 1))
    return noted


def test_states_are_those_of_ranks_before_layers_run_and_until_teardown(ranks: Any) -> None:
    """Layers that are split are compared with whole ones already while the module is made parallel."""
    found = ranks(2).run(when_states_are_those_of_ranks, "fsdp_custom")
    assert found == [["begin on 2", "parallelize", "step", "end"]] * 2

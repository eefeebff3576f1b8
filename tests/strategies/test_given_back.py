"""What a fit changes on objects of the user and of Lightning, and gives back; and what it has to leave alone."""

from __future__ import annotations

import warnings
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_parallel import full_state_dict
from tests.data import batches, loader
from tests.jobs.lifecycle import resume, save
from tests.models.cases import ByteGPT
from tests.names import num_readers
from tests.parity import TOLERANCE, difference, trainer_for
from tests.rank_pool import RankError

# Optimizers, loops, marks -------------------------------------------------------------------------------------------


class KeepsItsOptimizer(ByteGPT):
    def configure_optimizers(self) -> Any:
        self.optimizer = super().configure_optimizers()
        return self.optimizer


def on_optimizer(strategy: str, num_ranks: int) -> dict[str, Any]:
    """What is on an optimizer, and on the parameters that it steps, during and after a fit."""
    found: dict[str, Any] = {}

    def look(optimizer: torch.optim.Optimizer) -> tuple[int, list[str], int]:
        tables = [value for name, value in vars(optimizer).items() if name.endswith("_hooks")]
        own = sorted(name for name, value in vars(optimizer).items() if callable(value) and name != "step")
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        on_parameters = sum(len(getattr(p, "_post_accumulate_grad_hooks", None) or ()) for p in parameters)
        return sum(map(len, tables)), own, on_parameters

    class Look(Callback):
        def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
            found["during"] = look(pl_module.optimizer)

    module = KeepsItsOptimizer("adamw")
    trainer_for(strategy, num_ranks, callbacks=[Look()]).fit(module, loader(num_ranks, 2))
    found["after"] = look(module.optimizer)
    return found


@pytest.mark.parametrize(
    "strategy",
    [
        "fsdp_custom",
        "fsdp_custom:offload=optimizer",
        "fsdp_custom:optimizer_in_backward=true",
        "ddp_custom:offload=optimizer",
        "zero1_custom",
        "pp_custom:offload=optimizer",
    ],
)
def test_nothing_is_left_on_optimizers(ranks: Any, strategy: str) -> None:
    plain = on_optimizer("auto", 1)["after"]
    for found in ranks(2).run(on_optimizer, strategy, 2):
        assert found["during"] != plain
        assert found["after"] == plain


def inference_modes(strategy: str) -> dict[str, list[bool]]:
    """Whether the loops of a trainer evaluate under `inference_mode`."""
    found: dict[str, list[bool]] = {}

    def look(trainer: Any) -> list[bool]:
        return [loop.inference_mode for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop)]

    class Look(Callback):
        def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
            found["during"] = look(trainer)

    trainer = trainer_for(strategy, 2, callbacks=[Look()])
    trainer.fit(ByteGPT(), loader(2, 1))
    found["after"] = look(trainer)
    return found


def test_loops_have_their_inference_mode_back(ranks: Any) -> None:
    for found in ranks(2).run(inference_modes, "fsdp_custom"):
        assert found == {"during": [False] * 3, "after": [True] * 3}


class Marked(ByteGPT):
    """Its optimizer's groups follow from marks on parameters."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        for name, parameter in self.named_parameters():
            parameter.decay = 0.0 if "norm" in name or name.endswith("bias") else 0.5  # type: ignore[attr-defined]

    def configure_optimizers(self) -> Any:
        decays = {parameter.decay for parameter in self.parameters()}  # type: ignore[attr-defined]
        groups: list[dict[str, Any]] = [
            {"params": [p for p in self.parameters() if p.decay == decay], "weight_decay": decay}  # type: ignore[attr-defined]
            for decay in sorted(decays)
        ]
        return torch.optim.AdamW(groups, lr=1e-2, eps=1e-4)


def marked(strategy: str, num_ranks: int) -> tuple[dict[str, Tensor], list[float]]:
    L.seed_everything(3, verbose=False)
    module = Marked()
    trainer = trainer_for(strategy, num_ranks)
    trainer.fit(module, batches("byte_gpt", num_readers(strategy, num_ranks)))
    return full_state_dict(trainer), [getattr(p, "decay", -1.0) for p in module.parameters()]


@pytest.mark.parametrize("name", ["ddp_custom", "zero2_custom", "fsdp_custom", "tp_custom", "pp_custom"])
def test_marks_on_parameters_are_there_in_training_and_afterwards(ranks: Any, name: str) -> None:
    expected, marks = marked("auto", 1)
    assert set(marks) == {0.0, 0.5}
    (ours, ours_marks), (_, other_marks) = ranks(2).run(marked, name, 2)
    assert difference(ours, expected) <= TOLERANCE
    assert ours_marks == other_marks == marks


# Samples ------------------------------------------------------------------------------------------------------------


class Noting(L.LightningModule):
    """Notes the numbers that it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)
        self.read: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.read += batch[0].flatten().int().tolist()
        return self.net(batch[0]).pow(2).mean() * 1e-4

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


NUMBERS = list(range(16))


def read(strategy: str, kind: str) -> list[int]:
    """What this rank reads in an epoch, from a loader of one kind."""
    data = TensorDataset(torch.tensor(NUMBERS, dtype=torch.float32)[:, None])
    sampler = None
    if kind == "own sampler":  # the other way round than Lightning and the package deal them out
        sampler = DistributedSampler(data, num_replicas=2, rank=1 - dist.get_rank(), shuffle=False)
    trainer = trainer_for(strategy, 2, use_distributed_sampler=kind != "off")
    with warnings.catch_warnings():
        if kind == "off":  # of which a warning says that each sample counts twice
            warnings.filterwarnings("ignore", "ranks 0 and 1 have read the same samples")
        trainer.fit(module := Noting(), DataLoader(data, batch_size=2, sampler=sampler))
    return module.read


@pytest.mark.parametrize("name", ["ddp_custom", "fsdp_custom"])
def test_a_users_own_way_to_deal_out_samples_is_kept(ranks: Any, name: str) -> None:
    first, second = ranks(2).run(read, name, "plain")
    assert (first[0], second[0]) == (0, 1)
    assert sorted(first + second) == NUMBERS
    assert ranks(2).run(read, name, "own sampler") == [NUMBERS[1::2], NUMBERS[::2]]
    assert ranks(2).run(read, name, "off") == [NUMBERS, NUMBERS]


# Decisions and checkpoints ------------------------------------------------------------------------------------------


def decided(strategy: str, num_ranks: int) -> dict[str, bool]:
    """What all ranks decide together, where the last one, all and none of them say yes."""
    found: dict[str, bool] = {}
    votes = {"one": dist.get_rank() == num_ranks - 1, "each": True, "none": False}

    class Vote(Callback):
        def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
            for name, vote in votes.items():
                found[f"{name}, all"] = trainer.strategy.reduce_boolean_decision(vote, all=True)
                found[f"{name}, any"] = trainer.strategy.reduce_boolean_decision(vote, all=False)

    trainer_for(strategy, num_ranks, callbacks=[Vote()]).fit(ByteGPT(), batches("byte_gpt", 1, 1))
    return found


@pytest.mark.parametrize(("name", "size"), [("ddp_custom", 2), ("tp_custom", 2), ("fsdp_tp_custom", 4)])
def test_decisions_of_all_ranks_and_of_any(ranks: Any, name: str, size: int) -> None:
    for found in ranks(size).run(decided, name, size):
        assert {key for key, is_yes in found.items() if is_yes} == {"one, any", "each, all", "each, any"}
        assert len(found) == 6


class Lenient(ByteGPT):
    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.strict_loading = False


def resume_leniently(strategy: str, num_ranks: int, path: str) -> dict[str, Tensor]:
    trainer = trainer_for(strategy, num_ranks, max_epochs=2)
    trainer.fit(Lenient(), loader(num_ranks, 3), ckpt_path=path)
    return full_state_dict(trainer)


@pytest.mark.parametrize("name", ["ddp_custom", "fsdp_custom"])
def test_a_checkpoint_that_lacks_a_weight_is_refused(ranks: Any, tmp_path: Any, name: str) -> None:
    path = str(tmp_path / "whole.ckpt")
    save("auto", 1, path, "byte_gpt")
    checkpoint = torch.load(path, weights_only=False)
    del checkpoint["state_dict"]["model.norm.weight"]
    torch.save(checkpoint, path)
    with pytest.raises(RankError, match=r"Missing key\(s\) in state_dict: \"model.norm.weight\""):
        ranks(2).run(resume, name, 2, path, "byte_gpt")
    assert ranks(2).run(resume_leniently, name, 2, path)[0].keys() > checkpoint["state_dict"].keys()

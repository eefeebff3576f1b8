"""What user code does around layers and gradients, in ways that strategies do not expect: equal to one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_parallel
from lightning_parallel import build_strategy, full_state_dict
from lightning_parallel.callbacks import TokenWeighted
from tests.data import GLOBAL_BATCH, loader_of
from tests.models.cases import VOCABULARY
from tests.models.user_code import (
    ActorCritic,
    Adapted,
    BrokenOff,
    Collecting,
    Contrastive,
    Dropping,
    Growing,
    NormsOfLogits,
    Teacher,
    Tokens,
    Unused,
    ZerosKept,
)
from tests.names import num_readers
from tests.parity import (
    TOLERANCE,
    Outcome,
    Recorder,
    difference,
    is_moving,
    largest,
    make_trainer,
    reference,
    train,
    worst,
)
from tests.rank_pool import RankError


def tokens_of(steps: int, readers: int = 1) -> DataLoader[Any]:
    return loader_of("byte_gpt", steps=steps, global_batch=GLOBAL_BATCH, num_ranks=readers)


def fitted(make: Any, strategy: str, num_ranks: int, **kwargs: Any) -> Outcome:
    L.seed_everything(3, verbose=False)
    module, recorder = make(), Recorder()
    trainer = make_trainer(
        strategy if strategy == "auto" else build_strategy(strategy), num_ranks, callbacks=[recorder], **kwargs
    )
    readers = num_readers(strategy.partition(":")[0], num_ranks)
    trainer.fit(module, tokens_of(5, readers))
    if not module.automatic_optimization:
        recorder.outcome.losses = [0.0]  # each is that of a rank's samples
    recorder.outcome.final = full_state_dict(trainer)
    return recorder.outcome


@pytest.mark.parametrize(
    ("make", "strategies"),
    [
        (Teacher, ("ddp_custom", "fsdp_custom", "zero2_custom", "tp_custom", "cp_custom")),
        (ActorCritic, ("ddp_custom", "fsdp_custom", "zero2_custom", "fsdp_custom:layers=[]")),
        (Contrastive, ("ddp_custom", "fsdp_custom", "tp_custom", "cp_custom")),
        (Unused, ("fsdp_custom", "pp_custom", "tp_custom")),
        (ZerosKept, ("fsdp_custom", "fsdp_custom:layers=[]", "tp_custom")),
        (Collecting, ("fsdp_custom", "tp_custom")),
        (Adapted, ("fsdp_custom", "tp_custom")),
        (Growing, ("fsdp_custom", "tp_custom", "pp_custom")),
        (NormsOfLogits, ("tp_custom", "tp_custom:tensor_plan={head: vocab}")),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_equal_to_one_process(ranks: Any, make: Any, strategies: tuple[str, ...]) -> None:
    expected = fitted(make, "auto", 1)
    assert is_moving(expected)
    found = {name: worst(ranks(2).run(fitted, make, name, 2)[0], expected) for name in strategies}
    assert largest(found.values()) <= TOLERANCE, found


def test_samples_are_gathered_from_ranks_that_read_different_ones(ranks: Any) -> None:
    expected = fitted(Contrastive, "auto", 1)
    ours = ranks(4).run(fitted, Contrastive, "fsdp_tp_custom", 4)[0]
    assert worst(ours, expected) <= TOLERANCE


@pytest.mark.parametrize(("make", "microsteps"), [(BrokenOff, 2), (Dropping, 1)])
@pytest.mark.parametrize("strategy", ["fsdp_custom:accumulation_sync=last", "fsdp_custom:replicate=2", "ddp_custom"])
def test_a_window_that_is_broken_off_is_forgotten(ranks: Any, make: Any, microsteps: int, strategy: str) -> None:
    options: dict[str, Any] = {"accumulate_grad_batches": microsteps, "max_epochs": 2}
    expected = fitted(make, "auto", 1, **options)
    ours = ranks(2).run(fitted, make, strategy, 2, **options)[0]
    assert difference(ours.final, expected.final) <= TOLERANCE


def test_tokens_of_a_window_that_is_broken_off_do_not_count() -> None:
    """With as many tokens in each sample, the callback changes nothing."""
    found = []
    for callbacks in ([], [TokenWeighted()]):
        L.seed_everything(3, verbose=False)
        module = BrokenOff()
        trainer = make_trainer("auto", 1, callbacks=callbacks, accumulate_grad_batches=2, max_epochs=2)
        trainer.fit(module, tokens_of(4))
        found.append(full_state_dict(trainer))
    assert difference(*found) <= TOLERANCE


@pytest.mark.parametrize(("strategy", "size"), [("pp_custom", 2), ("fsdp_custom:accumulation_sync=last", 1)])
def test_unused_parameters_are_not_decayed_where_gradients_wait_in_another_dtype(
    ranks: Any, strategy: str, size: int
) -> None:
    options: dict[str, Any] = {"precision": "bf16-mixed", "accumulate_grad_batches": 2}
    ours = (
        fitted(Unused, strategy, 1, **options)
        if size == 1
        else ranks(size).run(fitted, Unused, strategy, size, **options)[0]
    )
    unused = [name for name in ours.final if "extra" in name]
    assert unused
    assert all(torch.equal(ours.final[name], ours.initial[name]) for name in unused)


# Refused ------------------------------------------------------------------------------------------------------------


class ClippingByItself(Tokens):
    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)


class ClippingByLightning(Tokens):
    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")


class ClippingBySuper(Tokens):
    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        super().configure_gradient_clipping(optimizer, 0.1, "norm")


class Nested(Tokens):
    def __init__(self) -> None:
        super().__init__()
        self.kept = {"heads": [self.model.head.weight]}


class Scaled(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 4


class ScaledEmbedding(Tokens):
    def __init__(self) -> None:
        super().__init__()
        self.model.tokens = Scaled(VOCABULARY, 16)


class CountingEmbedding(Tokens):
    def __init__(self) -> None:
        super().__init__()
        self.model.tokens = nn.Embedding(VOCABULARY, 16, scale_grad_by_freq=True)


@pytest.mark.parametrize(
    ("make", "strategy", "words"),
    [
        (
            ClippingByItself,
            "pp_custom",
            "configure_gradient_clipping does not call self.clip_gradients",
        ),
        (Nested, "fsdp_custom", "where sharding cannot replace them: kept"),
        (ScaledEmbedding, "tp_custom:tensor_plan={tokens: vocab}", "'tokens' names no embedding or head"),
        (CountingEmbedding, "tp_custom:tensor_plan={tokens: vocab}", "scale_grad_by_freq"),
    ],
)
def test_refused(ranks: Any, make: Any, strategy: str, words: str) -> None:
    with pytest.raises(RankError) as caught:
        ranks(2).run(fitted, make, strategy, 2)
    assert words in str(caught.value)


@pytest.mark.parametrize("make", [ClippingByLightning, ClippingBySuper])
def test_a_clipping_that_asks_lightning_runs_under_a_pipeline(ranks: Any, make: Any) -> None:
    expected = fitted(make, "auto", 1)
    assert worst(ranks(2).run(fitted, make, "pp_custom", 2)[0], expected) <= TOLERANCE


# What is left behind ------------------------------------------------------------------------------------------------


class Drawing(Tokens):
    """Notes the first numbers of a fit."""

    drawn: Tensor

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def on_train_start(self) -> None:
        self.drawn = torch.rand(4)

    def on_train_batch_end(self, *args: Any) -> None:
        self.trainer.save_checkpoint(self.path)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.model(batch[0])


def drawn(folder: str, *, evaluates: bool) -> Tensor:
    """What a fit draws, perhaps after an evaluation of another run's checkpoint."""
    loader, path = tokens_of(2), f"{folder}/other.ckpt"
    L.seed_everything(1, verbose=False)
    first = make_trainer(build_strategy("fsdp_custom"), 2)
    first.fit(Drawing(path), loader)
    trainer, module = make_trainer(build_strategy("fsdp_custom"), 2), Drawing(path)
    if evaluates:
        trainer.validate(module, loader, ckpt_path=path, verbose=False)
    L.seed_everything(7, verbose=False)
    trainer.fit(module, loader)
    return module.drawn


def test_an_evaluated_checkpoint_gives_no_random_numbers_to_a_fit(ranks: Any, tmp_path: Path) -> None:
    (after, _), (alone, _) = (ranks(2).run(drawn, str(tmp_path), evaluates=flag) for flag in (True, False))
    assert torch.equal(after, alone)


def timeouts(seconds: float) -> set[float]:
    strategy = lightning_parallel.MeshStrategy(tensor=2, timeout=seconds)
    make_trainer(strategy, 2).fit(Tokens(), tokens_of(1))
    groups: list[Any] = [strategy.mesh.gradient_group, strategy.mesh.tensor.get_group()]  # type: ignore[union-attr]
    return {group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups}


def test_the_timeout_is_that_of_every_group(ranks: Any) -> None:
    assert ranks(2).run(timeouts, 77.0) == [{77.0}] * 2


def test_compiled_under_one_name_and_then_under_another(ranks: Any) -> None:
    """torch compiles what a mode does to a call, and does it wrong, where the layer under it is not compiled again."""
    for name in ("tp_custom:compile=layers", "cp_custom:compile=layers"):
        ours = ranks(2).run(train, "odd_length", "adamw", name, 2, 1)[0]
        assert worst(ours, reference("odd_length")) <= TOLERANCE, name

"""A plain mean loss becomes the mean over all valid tokens of a window, on any number of ranks and microsteps."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader

from lightning_parallel import ConfigurationError, full_state_dict
from lightning_parallel.callbacks import TokenWeighted
from lightning_parallel.callbacks.token_weighted import LossObserver
from tests.data import IGNORED, loader, ragged
from tests.models.cases import CASES
from tests.models.padded import Padded
from tests.parity import TOLERANCE, difference, once, trainer_for

NAMES = [("ddp_custom", 2), ("zero1_custom", 2), ("zero2_custom", 2), ("fsdp_custom", 2), ("hsdp_custom", 4)]


class Tokens(Callback):
    """The numbers that TokenWeighted logged."""

    def __init__(self) -> None:
        self.logged: list[float] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if "exact" in trainer.callback_metrics and (not self.logged or trainer.global_step > len(self.logged)):
            self.logged.append(float(trainer.callback_metrics["exact"]))


def count_labels(batch: Any) -> Tensor:
    return (batch[1] != IGNORED).sum()


def fit(
    strategy: str,
    num_ranks: int,
    accumulate: int,
    kind: str,
    weighting: dict[str, Any] | None,
    samples: int = 48,
    readers: int | None = None,
    clip: float | None = 0.3,
) -> dict[str, Any]:
    """Windows of 16 samples, in whatever microsteps; the last may be a short one."""
    L.seed_everything(3, verbose=False)
    batch = 16 // (readers or num_ranks) // accumulate
    watching = Tokens()
    callbacks = [] if weighting is None else [TokenWeighted(**weighting, log="exact"), watching]
    trainer = trainer_for(
        strategy, num_ranks, callbacks=callbacks, accumulate_grad_batches=accumulate, gradient_clip_val=clip
    )
    trainer.fit(Padded(kind), DataLoader(ragged(samples), batch_size=batch))
    return {"weights": full_state_dict(trainer), "logged": watching.logged}


WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "observed": ("cross_entropy", {}),
    "observed in a module": ("nll", {}),
    "observed with class weights": ("weights", {}),
    "a key": ("cross_entropy", {"key": 1}),
    "a function": ("by hand", {"count": count_labels}),
}


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize(("name", "size"), NAMES)
def test_ranks_and_microsteps_equal_one_batch(ranks: Any, name: str, size: int, accumulate: int) -> None:
    expected = once(fit, "auto", 1, 1, "cross_entropy", None)["weights"]
    ours = ranks(size).run(fit, name, size, accumulate, "cross_entropy", {})[0]
    assert difference(ours["weights"], expected) < TOLERANCE
    plain = ranks(size).run(fit, name, size, accumulate, "cross_entropy", None)[0]
    assert not difference(plain["weights"], expected) < 1e-3  # without it, the numbers are others, or none at all
    assert ours["logged"] == pytest.approx(fit("auto", 1, 1, "cross_entropy", {})["logged"], rel=1e-5)
    assert len(ours["logged"]) == 3


@pytest.mark.parametrize("clip", [0.3, None])
@pytest.mark.parametrize(("name", "size", "accumulate"), [("auto", 1, 4), ("ddp_custom", 2, 2), ("fsdp_custom", 2, 4)])
def test_a_short_last_window(ranks: Any, name: str, size: int, accumulate: int, clip: float | None) -> None:
    """Two windows of 16 samples and one of 8, whose microsteps Lightning divides by those of a whole window.

    A clipped gradient has the same norm whatever it was divided by.
    """
    expected = once(fit, "auto", 1, 1, "cross_entropy", None, 40, clip=clip)["weights"]
    arguments = name, size, accumulate, "cross_entropy", {}, 40
    ours = fit(*arguments, clip=clip) if size == 1 else ranks(size).run(fit, *arguments, clip=clip)[0]
    assert difference(ours["weights"], expected) < TOLERANCE
    assert ours["logged"] == pytest.approx(fit("auto", 1, 1, "cross_entropy", {}, 40, clip=clip)["logged"], rel=1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_count(ranks: Any, way: str) -> None:
    kind, weighting = WAYS[way]
    expected = fit("auto", 1, 1, kind, None)["weights"]
    ours = ranks(2).run(fit, "fsdp_custom", 2, 2, kind, weighting)[0]
    assert difference(ours["weights"], expected) < TOLERANCE


@pytest.mark.parametrize("loss", ["microbatch", "batch", "auto"])
@pytest.mark.parametrize(
    ("strategy", "size", "readers", "accumulate"),
    [("pp_custom", 2, 1, 1), ("pp_custom", 2, 1, 2), ("fsdp_custom:pipeline=2", 4, 2, 2)],
)
def test_microbatches_of_a_pipeline(
    ranks: Any, strategy: str, size: int, readers: int, accumulate: int, loss: str
) -> None:
    expected = fit("auto", 1, 1, "cross_entropy", None)["weights"]
    strategy += f"{',' if ':' in strategy else ':'}loss={loss}"
    ours = ranks(size).run(fit, strategy, size, accumulate, "cross_entropy", {}, readers=readers)[0]
    assert difference(ours["weights"], expected) < TOLERANCE
    assert ours["logged"] == pytest.approx(fit("auto", 1, 1, "cross_entropy", {})["logged"], rel=1e-5)


@pytest.mark.parametrize("way", ["observed with class weights", "a key", "a function"])
def test_every_way_to_count_microbatches(ranks: Any, way: str) -> None:
    kind, weighting = WAYS[way]
    expected = fit("auto", 1, 1, kind, None)["weights"]
    ours = ranks(2).run(fit, "pp_custom:loss=microbatch", 2, 1, kind, weighting, readers=1)[0]
    assert difference(ours["weights"], expected) < TOLERANCE


def test_one_process_accumulates_exactly() -> None:
    expected = once(fit, "auto", 1, 1, "cross_entropy", None)["weights"]
    assert difference(fit("auto", 1, 4, "cross_entropy", {})["weights"], expected) < TOLERANCE
    assert difference(fit("dp_custom", 1, 4, "cross_entropy", {})["weights"], expected) < TOLERANCE


class Manual(Padded):
    """Two microsteps a step, divided by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        for half in (slice(0, None, 2), slice(1, None, 2)):
            self.manual_backward(self.loss(batch[0][half], batch[1][half]) / 2)
        optimizer.step()
        optimizer.zero_grad()


def fit_manual(strategy: str, num_ranks: int) -> dict[str, Tensor]:
    L.seed_everything(3, verbose=False)
    trainer = trainer_for(strategy, num_ranks, callbacks=[TokenWeighted()])
    trainer.fit(Manual(), DataLoader(ragged(48), batch_size=16 // num_ranks))
    return full_state_dict(trainer)


def fit_whole(_: str = "auto") -> dict[str, Tensor]:
    L.seed_everything(3, verbose=False)
    trainer = trainer_for("auto", 1)
    trainer.fit(Padded(), DataLoader(ragged(48), batch_size=16))
    return full_state_dict(trainer)


@pytest.mark.parametrize("name", ["ddp_custom", "fsdp_custom"])
def test_manual_optimization(ranks: Any, name: str) -> None:
    assert difference(ranks(2).run(fit_manual, name, 2)[0], fit_whole()) < TOLERANCE
    assert difference(fit_manual("auto", 1), fit_whole()) < TOLERANCE


def refusal(strategy: str, num_ranks: int, case: str, weighting: dict[str, Any]) -> str:
    try:
        L.seed_everything(3, verbose=False)
        trainer = trainer_for(strategy, num_ranks, callbacks=[TokenWeighted(**weighting)])
        trainer.fit(CASES[case]("sgd"), loader(num_ranks, 2, case))
    except ConfigurationError as error:
        return str(error)
    return ""


def nothing(batch: Any) -> None:
    return None


def negative(batch: Any) -> int:
    return -1


@pytest.mark.parametrize(
    ("case", "weighting", "words"),
    [
        ("byte_gpt", {"count": nothing}, ["found no mean cross-entropy", "count=..."]),
        ("byte_gpt", {"count": negative}, ["-1.0 is no number of tokens"]),
        ("byte_gpt", {"key": "labels"}, ["key='labels'", "list"]),
        ("gan", {}, ["there are 2"]),
    ],
)
def test_what_cannot_be_counted_is_refused(case: str, weighting: dict[str, Any], words: list[str]) -> None:
    message = refusal("auto", 1, case, weighting)
    assert [word for word in words if word not in message] == [], message


def test_two_ways_at_once_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="one of the two"):
        TokenWeighted(count_labels, key=1)


def test_update_in_backward_is_refused(ranks: Any) -> None:
    message = ranks(2).run(refusal, "fsdp_custom:optimizer_in_backward=true", 2, "byte_gpt", {})[0]
    assert "optimizer_in_backward=True" in message


def test_observed_numbers() -> None:
    logits, target = torch.randn(4, 5, requires_grad=True), torch.tensor([1, IGNORED, 2, 3])
    with LossObserver() as observer:
        F.cross_entropy(logits, target)
        F.cross_entropy(logits.detach(), target[:1].expand(4))  # a metric, no loss
    assert observer.count() == 3
    with LossObserver() as observer:
        F.cross_entropy(logits, target)
        F.cross_entropy(logits, target.clamp(min=0))
    assert observer.count() is None  # two losses over different numbers
    with LossObserver() as observer:
        F.cross_entropy(logits, target, reduction="sum")
    assert observer.count() is None
    with LossObserver() as observer:
        F.cross_entropy(logits, logits.detach().softmax(-1))
    assert observer.count() == 4


class Empty(Padded):
    """The second batch has no label that counts."""

    def loss(self, tokens: Tensor, labels: Tensor) -> Tensor:
        is_empty = self.trainer.global_step == 1
        return super().loss(tokens, torch.full_like(labels, IGNORED) if is_empty else labels)


def fit_empty(strategy: str, num_ranks: int, weighs: bool) -> dict[str, Tensor]:
    L.seed_everything(3, verbose=False)
    trainer = trainer_for(strategy, num_ranks, callbacks=[TokenWeighted()] if weighs else [])
    trainer.fit(Empty(), DataLoader(ragged(48), batch_size=16 // num_ranks))
    return full_state_dict(trainer)


def test_a_window_without_any_token(ranks: Any) -> None:
    expected = fit_empty("auto", 1, weighs=False)
    assert difference(ranks(2).run(fit_empty, "fsdp_custom", 2, weighs=True)[0], expected) < TOLERANCE


class Skipping(Padded):
    """Ends the epoch before its second step."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 1 else None


class OwnMode(Padded):
    """Has a mode of its own from hook to hook, and notes the functions that it sees in the callback's hooks."""

    class Mode(TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.is_on = False

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.is_on = True
            return func(*args, **(kwargs or {}))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.mode = self.Mode()
        self.mode.__enter__()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.mode.is_on = False
        torch.ones(1).add(1)
        assert self.mode.is_on, "somebody else has left the mode of this module"
        self.mode.__exit__(None, None, None)


@pytest.mark.parametrize("make", [Skipping, OwnMode])
def test_modes_of_functions_are_left_as_they_were_found(make: type[Padded]) -> None:
    trainer = trainer_for("auto", 1, callbacks=[TokenWeighted()])
    trainer.fit(make(), DataLoader(ragged(48), batch_size=16))
    assert torch.overrides._get_current_function_mode() is None

"""Losses of the whole batch under a pipeline: what comes after the stack runs once."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import pytest
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader

from lightning_parallel import ConfigurationError
from tests.data import batches
from tests.models.losses import LOSSES, OTHERS
from tests.parity import TOLERANCE, Outcome, is_moving, once, train_module, worst


def fitted(case: str, strategy: str, num_ranks: int, readers: int, **kwargs: Any) -> Outcome:
    """Five steps with a loss of `tests.models.losses`."""
    kind, data = OTHERS.get(case) or (LOSSES[case], None)
    make = functools.partial(kind, "adamw")
    loader = DataLoader(data(40), batch_size=8 // readers) if data else batches("byte_gpt", readers)
    return train_module(make, loader, strategy, num_ranks, **kwargs)


def expected(case: str, **kwargs: Any) -> Outcome:
    found: Outcome = once(fitted, case, "auto", 1, 1, **kwargs)
    assert is_moving(found)
    return found


@pytest.mark.parametrize(
    ("case", "schedule"),
    [
        *(("ignored", schedule) for schedule in ("gpipe", "interleaved,virtual_stages=2", "zbv", "dualpipev")),
        *((case, "1f1b") for case in LOSSES),
        ("contrast", "interleaved,virtual_stages=2"),
    ],
)
def test_any_loss_is_exact_on_the_whole_batch(ranks: Any, case: str, schedule: str) -> None:
    ours = ranks(2).run(fitted, case, f"pp_custom:loss=batch,schedule={schedule}", 2, 1)[0]
    difference = worst(ours, expected(case))
    print(f"{case} {schedule}: {difference:.1e}")
    assert difference < TOLERANCE


@pytest.mark.parametrize("case", ["ignored", "contrast"])
def test_microbatches_make_other_numbers(ranks: Any, case: str) -> None:
    """The tests above would notice."""
    ours = ranks(2).run(fitted, case, "pp_custom:loss=microbatch", 2, 1)[0]
    assert worst(ours, expected(case)) > 100 * TOLERANCE


PRODUCTS = [
    ("contrast", "fsdp_custom:pipeline=2", {}),
    ("ignored", "fsdp_custom:pipeline=2,schedule=interleaved,virtual_stages=2", {}),
    ("contrast", "fsdp_custom:pipeline=2,replicate=2,schedule=gpipe", {}),
    ("ignored", "fsdp_custom:pipeline=2,reshard=never,recompute=full", {}),
    ("contrast", "fsdp_custom:pipeline=2", {"accumulate_grad_batches": 2}),
    ("ignored", "fsdp_custom:pipeline=2,accumulation_sync=last", {"accumulate_grad_batches": 2}),
]


@pytest.mark.parametrize(("case", "strategy", "kwargs"), PRODUCTS)
def test_products(ranks: Any, case: str, strategy: str, kwargs: dict[str, Any]) -> None:
    """As with as many ranks that read, each of which has a loss of its own batch."""
    theirs = ranks(2).run(fitted, case, "ddp_custom", 2, 2, **kwargs)[0]
    ours = ranks(4).run(fitted, case, f"{strategy},loss=batch", 4, 2, **kwargs)[0]
    assert worst(ours, theirs) < TOLERANCE


@pytest.mark.parametrize("cut", ["tensor=2,sequence=true", "context=2"])
def test_layers_that_are_split(ranks: Any, cut: str) -> None:
    ours = ranks(4).run(fitted, "ignored", f"fsdp_custom:pipeline=2,{cut},loss=batch", 4, 1)[0]
    assert worst(ours, expected("ignored")) < TOLERANCE


def test_bf16(ranks: Any) -> None:
    ours = ranks(2).run(fitted, "ignored", "pp_custom:loss=batch", 2, 1, precision="bf16-mixed")[0]
    assert worst(ours, expected("ignored", precision="bf16-mixed")) < 2e-2


# loss="auto" --------------------------------------------------------------------------------------------------------


def said(case: str, strategy: str, num_ranks: int, readers: int, **kwargs: Any) -> tuple[Outcome, str]:
    """A fit, and what it has told about losses."""
    with mock.patch("lightning_parallel.strategies.loss_choice.rank_zero_info") as info:
        outcome = fitted(case, strategy, num_ranks, readers, **kwargs)
    return outcome, "\n".join(call.args[0] for call in info.call_args_list)


@pytest.mark.parametrize(
    ("case", "schedule"), [*((case, "1f1b") for case in LOSSES), ("ignored", "interleaved,virtual_stages=2")]
)
def test_auto_is_exact_and_says_so(ranks: Any, case: str, schedule: str) -> None:
    for ours, words in ranks(2).run(said, case, f"pp_custom:schedule={schedule}", 2, 1):
        if ours.final:
            assert worst(ours, expected(case)) < TOLERANCE
        assert ("runs for each microbatch" if case == "mean" else "once on the whole batch") in words
        assert words.count("loss='auto'") == 1


@pytest.mark.parametrize("case", ["other label", "other label, later", "own mean", "tracked", "counting", "entropy"])
def test_auto_is_exact_where_it_is_hard_to_see(ranks: Any, case: str) -> None:
    ours, words = ranks(2).run(said, case, "pp_custom", 2, 1)[0]
    assert worst(ours, expected(case)) < TOLERANCE
    assert "once on the whole batch" in words
    ours = ranks(2).run(fitted, case, "pp_custom:loss=batch", 2, 1)[0]
    assert worst(ours, expected(case)) < TOLERANCE


def logged(case: str, strategy: str, num_ranks: int) -> tuple[dict[str, float], str]:
    """The values that a fit has logged, and what it has told about losses."""
    found: dict[str, float] = {}

    class Values(Callback):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            found.update({name: float(value) for name, value in trainer.callback_metrics.items()})

    words = said(case, strategy, num_ranks, 1, watching=[Values()])[1]
    return found, words


def test_auto_sees_values_that_are_no_means(ranks: Any) -> None:
    (ours, words), _ = ranks(2).run(logged, "perplexity", "pp_custom:check=first_step", 2)
    assert "'perplexity' would be logged as" in words
    assert ours == pytest.approx(once(logged, "perplexity", "auto", 1)[0], rel=TOLERANCE)


@pytest.mark.parametrize("case", ["mean", "ignored"])
def test_auto_in_bf16(ranks: Any, case: str) -> None:
    ours, words = ranks(2).run(said, case, "pp_custom", 2, 1, precision="bf16-mixed")[0]
    assert worst(ours, expected(case, precision="bf16-mixed")) < 2e-2
    assert ("runs for each microbatch" if case == "mean" else "once on the whole batch") in words


def test_ranks_that_read_other_samples_choose_alike(ranks: Any) -> None:
    """Labels are ignored in the batches of one of them only."""
    theirs = ranks(2).run(fitted, "late", "ddp_custom", 2, 2)[0]
    ours, words = ranks(4).run(said, "late", "fsdp_custom:pipeline=2", 4, 2)[0]
    assert worst(ours, theirs) < TOLERANCE
    assert "runs for each microbatch" in words
    assert "different numbers of entries" in words


def test_trials_leave_held_gradients_alone(ranks: Any) -> None:
    """The fourth step, in which losses are tried again, is the second one of a window."""
    theirs = ranks(2).run(fitted, "mean", "ddp_custom", 2, 2, accumulate_grad_batches=2)[0]
    options = "pipeline=2,accumulation_sync=last"
    ours, words = ranks(4).run(said, "mean", f"fsdp_custom:{options}", 4, 2, accumulate_grad_batches=2)[0]
    assert worst(ours, theirs) < TOLERANCE
    assert "runs for each microbatch" in words


def drawn(strategy: str, case: str, num_ranks: int = 2, readers: int = 1) -> str:
    try:
        return said(case, strategy, num_ranks, readers)[1]
    except ConfigurationError as error:
        return str(error)


@pytest.mark.parametrize(
    ("loss", "case", "expected_words"),
    [
        ("auto", "only with gradients", "no loss without gradients"),
        ("auto", "sometimes masked", "draws random numbers before the stack"),
        ("batch", "sometimes masked", "draw them in the data loader"),
    ],
)
def test_what_one_rank_that_reads_finds_holds_for_all(ranks: Any, loss: str, case: str, expected_words: str) -> None:
    """The others wait for nobody: they gather parameters together, in trials too."""
    words = ranks(4).run(drawn, f"fsdp_custom:pipeline=2,loss={loss}", case, 4, 2)
    assert expected_words in words[0]
    assert len(set(words)) == 1

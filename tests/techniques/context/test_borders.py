"""Context parallel where it is easy to get wrong: what passes beside hidden states, lengths, and how layers compute."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_parallel import ConfigurationError, build_strategy
from tests.data import batches
from tests.models.sequence_nets import (
    REFUSED,
    RUN,
    AddsBetween,
    FailsOnce,
    LeavesEarlyInEvaluation,
    NotANumber,
    SecondMixes,
    SumsLayers,
    changed,
    with_table_in_fp32,
)
from tests.parity import TOLERANCE, Outcome, make_trainer, once, train_module, worst

KINDS = ("ulysses", "ring")


def trained(name: str, strategy: str, num_ranks: int) -> Outcome:
    return train_module(RUN[name], batches("byte_gpt", 1), strategy, num_ranks)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", RUN)
def test_equal_to_one_process(ranks: Any, name: str, kind: str) -> None:
    expected = once(trained, name, "auto", 1)
    assert worst(ranks(2).run(trained, name, f"cp_custom:context_attention={kind}", 2)[0], expected) < TOLERANCE


def refusal(name: str, kind: str, attention: str) -> str:
    try:
        train_module(REFUSED[name, kind][0], batches("byte_gpt", 1), f"cp_custom:context_attention={attention}", 2)
    except ConfigurationError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("attention", KINDS)
@pytest.mark.parametrize(("name", "kind"), REFUSED)
def test_what_parts_would_compute_differently_is_refused(ranks: Any, name: str, kind: str, attention: str) -> None:
    if kind not in ("both", attention):
        pytest.skip("it runs, or is refused for another reason")
    assert REFUSED[name, kind][1] in ranks(2).run(refusal, name, kind, attention)[0]


def between(make: Any, strategy: str) -> str:
    try:
        train_module(make, batches("byte_gpt", 1), strategy, 2)
    except ConfigurationError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (AddsBetween, "code behind layers.0, where each rank has a part of the sequence (8 of 16 positions)"),
        (SumsLayers, "those of the others, which the step or a hook has kept, are parts (8 of 16 positions)"),
    ],
)
def test_code_between_layers_of_split_activations_is_refused_in_words(ranks: Any, make: Any, words: str) -> None:
    message = ranks(2).run(between, make, "tp_custom:sequence=true")[0]
    assert words in message
    assert "sequence=False" in message


def early_evaluation() -> str:
    try:
        trainer = make_trainer(build_strategy("cp_custom"), 2)
        trainer.validate(LeavesEarlyInEvaluation(), batches("byte_gpt", 1), verbose=False)
    except ConfigurationError as error:
        return str(error)
    return ""


def test_an_evaluation_that_leaves_early_is_refused(ranks: Any) -> None:
    assert "left it before the last layer" in ranks(2).run(early_evaluation)[0]


def fit_after_an_error(strategy: str) -> float:
    module = FailsOnce()
    with pytest.raises(MemoryError):
        make_trainer(build_strategy(strategy), 2).fit(module, batches("byte_gpt", 1))
    trainer = make_trainer(build_strategy(strategy), 2)
    trainer.validate(module, batches("byte_gpt", 1), verbose=False)
    trainer.fit(module, batches("byte_gpt", 1))
    return float(trainer.callback_metrics["train_loss"])


@pytest.mark.parametrize("strategy", ["cp_custom", "tp_custom:sequence=true", "fsdp_custom:recompute=full"])
def test_a_step_that_failed_in_the_middle_is_forgotten(ranks: Any, strategy: str) -> None:
    """The module is still sharded then, and is trained on as it is."""
    losses = ranks(2).run(fit_after_an_error, strategy)
    assert min(losses) > 0


def in_bf16(strategy: str, num_ranks: int) -> Outcome:
    return train_module(
        changed(with_table_in_fp32), batches("byte_gpt", 1), strategy, num_ranks, precision="bf16-mixed"
    )


@pytest.mark.parametrize("kind", KINDS)
def test_attention_of_several_dtypes_under_autocast(ranks: Any, kind: str) -> None:
    """Attention casts under autocast, so a table in fp32 is no error there."""
    expected = once(in_bf16, "auto", 1)
    ours = ranks(2).run(in_bf16, f"cp_custom:context_attention={kind}", 2)[0]
    assert ours.losses == pytest.approx(expected.losses, rel=2e-2)


def sanity(strategy: str, num_ranks: int) -> float:
    trainer = make_trainer(build_strategy(strategy), num_ranks)
    trainer.validate(NotANumber(), batches("byte_gpt", 1), verbose=False)
    return float(trainer.callback_metrics["val_loss"])


def test_a_batch_that_is_not_a_number_is_no_difference(ranks: Any) -> None:
    assert all(value != value for value in ranks(2).run(sanity, "cp_custom", 2))


def refused_twice() -> list[str]:
    module, found = SecondMixes(), []
    for strategy in ("cp_custom", "cp_custom:recompute=full"):
        with pytest.raises(ConfigurationError) as caught:
            make_trainer(build_strategy(strategy), 2).fit(module, batches("byte_gpt", 1))
        found.append(str(caught.value))
    return found


def test_a_module_left_cut_says_so(ranks: Any) -> None:
    first, second = ranks(2).run(refused_twice)[0]
    assert "changes what layers.1" in first
    assert "still sharded by an earlier fit" in second

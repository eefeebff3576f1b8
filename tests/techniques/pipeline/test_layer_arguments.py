"""Layers that take or make more than hidden states, over stages."""

from __future__ import annotations

from typing import Any

import pytest
from lightning import seed_everything

from lightning_parallel import ConfigurationError, build_strategy
from tests.data import batches
from tests.jobs.argument_nets import expected, trained
from tests.models.argument_nets import Complicated, ConditionedToTheEnd
from tests.models.cases import Case
from tests.parity import TOLERANCE, make_trainer, train_module, worst


@pytest.mark.parametrize("name", ["conditioned_to_the_end", "from_the_first", "decoder"])
@pytest.mark.parametrize(
    ("strategy", "size"),
    [
        ("pp_custom:stages=time,recompute=full", 2),
        ("pp_custom:schedule=gpipe,stages=[1,2],compile=layers", 2),
        ("fsdp_custom:pipeline=2,tensor=2", 4),
        ("fsdp_custom:pipeline=2,context=2", 4),
    ],
)
def test_what_passes_beside_hidden_states(ranks: Any, name: str, strategy: str, size: int) -> None:
    strategy += ",layers=layers" if name == "decoder" else ""
    assert worst(ranks(size).run(trained, name, strategy, size)[0], expected(name)) < TOLERANCE


@pytest.mark.parametrize("schedule", ["zbv", "dualpipev", "interleaved,virtual_stages=2"])
def test_beside_hidden_states_of_several_stages_a_rank(ranks: Any, schedule: str) -> None:
    found = ranks(2).run(trained, "deep", f"pp_custom:schedule={schedule}", 2)[0]
    assert worst(found, expected("deep")) < TOLERANCE


def evaluated(strategy: str, num_ranks: int) -> float:
    seed_everything(3, verbose=False)
    trainer = make_trainer(strategy if strategy == "auto" else build_strategy(strategy), num_ranks)
    return float(trainer.validate(ConditionedToTheEnd(), batches("byte_gpt", 1), verbose=False)[0]["val_loss"])


def test_an_evaluation_before_training_passes_conditions(ranks: Any) -> None:
    found = ranks(2).run(evaluated, "pp_custom", 2)
    assert found == pytest.approx([evaluated("auto", 1)] * 2, abs=1e-5)


def test_the_loss_may_take_what_the_last_stage_has_received(ranks: Any) -> None:
    assert worst(ranks(2).run(trained, "uses_the_middle", "pp_custom", 2)[0], expected("uses_the_middle")) < TOLERANCE


def refused_pipeline(module: type[Case], strategy: str, num_ranks: int) -> str:
    try:
        train_module(module, batches("byte_gpt", 1), strategy, num_ranks)
    except ConfigurationError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("name", "size"), [("changes_the_condition", 2), ("only_the_last", 4)])
def test_what_passes_layers_by(ranks: Any, name: str, size: int) -> None:
    """Between two layers of its stage, and past a stage whose layers are not given it."""
    assert worst(ranks(size).run(trained, name, "pp_custom", size)[0], expected(name)) < TOLERANCE


@pytest.mark.parametrize(
    ("module", "strategy", "size", "words"),
    [
        (Complicated, "pp_custom", 2, ["layers.2 is given a tensor of torch.complex64 with 2 dimensions", "float32"]),
    ],
)
def test_what_does_not_pass_is_refused(
    ranks: Any, module: type[Case], strategy: str, size: int, words: list[str]
) -> None:
    message = ranks(size).run(refused_pipeline, module, strategy, size)[0]
    assert [word for word in words if word not in message] == [], message

"""Stages that take turns: manual optimization under a pipeline, and steps that call layers twice."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader

from lightning_parallel import ConfigurationError
from tests.data import batches
from tests.models import turns
from tests.models.cases import Case
from tests.models.turns import TURNS
from tests.parity import BF16, TOLERANCE, Outcome, checked, is_moving, once, train_module, trainer_for, worst
from tests.rank_pool import RankError


def fitted(kind: type[Case], strategy: str, num_ranks: int, readers: int = 1, **kwargs: Any) -> Outcome:
    """Five steps."""
    return train_module(functools.partial(kind, "adamw"), batches("byte_gpt", readers), strategy, num_ranks, **kwargs)


def expected(kind: type[Case], **kwargs: Any) -> Outcome:
    found: Outcome = once(fitted, kind, "auto", 1, **kwargs)
    assert is_moving(found)
    return found


@pytest.mark.parametrize("case", TURNS)
def test_equals_one_process(ranks: Any, case: str) -> None:
    """Layers are those of the stack that the module has; the proof of the first step agrees."""
    for ours in ranks(2).run(fitted, TURNS[case], checked("pp_custom"), 2):
        if ours.final:
            difference = worst(ours, expected(TURNS[case]))
            print(f"{case}: {difference:.1e}")
            assert difference < TOLERANCE
        assert ours.losses == pytest.approx(expected(TURNS[case]).losses, abs=TOLERANCE)


PRODUCTS = [
    (turns.TwoOptimizers, "fsdp_custom:pipeline=2"),
    (turns.AcrossStages, "fsdp_custom:pipeline=2,replicate=2,reshard=never"),
    (turns.Adversarial, "fsdp_custom:pipeline=2,recompute=full"),
    (turns.Accumulating, "fsdp_custom:pipeline=2"),
    (turns.Refining, "fsdp_custom:pipeline=2"),
]


@pytest.mark.parametrize(("kind", "strategy"), PRODUCTS)
def test_products(ranks: Any, kind: type[Case], strategy: str) -> None:
    """Two groups of stages, which read other samples."""
    ours = ranks(4).run(fitted, kind, strategy, 4, 2)[0]
    assert worst(ours, expected(kind)) < TOLERANCE


@pytest.mark.parametrize("cut", ["tensor=2,sequence=true", "context=2"])
def test_layers_that_are_split(ranks: Any, cut: str) -> None:
    ours = ranks(4).run(fitted, turns.Manual, f"fsdp_custom:pipeline=2,{cut}", 4)[0]
    assert worst(ours, expected(turns.Manual)) < TOLERANCE


def test_half_precision(ranks: Any) -> None:
    ours = ranks(2).run(fitted, turns.Manual, "pp_custom", 2, precision="bf16-mixed")[0]
    assert worst(ours, expected(turns.Manual, precision="bf16-mixed")) < BF16


def test_stages_take_turns_where_that_is_asked_for(ranks: Any) -> None:
    """With as many layers as one wants on each, and any schedule of gradients."""
    strategy = "pp_custom:schedule=turns,stages=[1,3]"
    ours = ranks(2).run(fitted, turns.Deep, strategy, 2, accumulate_grad_batches=2)[0]
    assert worst(ours, expected(turns.Deep, accumulate_grad_batches=2)) < TOLERANCE


def test_checkpoints_of_the_user_around_layers(ranks: Any) -> None:
    """Those of each layer: backward calls no layer of another rank. Numbers of the step are those of one process."""
    ours = ranks(2).run(fitted, turns.Checkpointing, "pp_custom", 2)[0]
    theirs = fitted(turns.Checkpointing, "auto", 1)
    # The stream of a rank, from which its steps draw, begins elsewhere than that of one process.
    assert ours.losses == pytest.approx(theirs.losses, abs=0.1)


def drawn(strategy: str, num_ranks: int) -> tuple[list[float], list[float]]:
    """The losses of a module with dropout in its layers, and the numbers that it has drawn at the end of each step."""
    modules: list[turns.Dropping] = []

    def made() -> turns.Dropping:
        modules.append(turns.Dropping("sgd"))
        return modules[-1]

    losses = train_module(made, batches("byte_gpt", 1), strategy, num_ranks).losses
    return losses, modules[0].drawn


def test_ranks_stay_in_one_stream_of_random_numbers(ranks: Any) -> None:
    """Layers draw on their rank only, and other numbers in each step."""
    first, second = ranks(2).run(drawn, "pp_custom:stages=[1,3]", 2)
    assert first == second
    assert len(set(first[1])) == 5


def combined(strategy: str, num_ranks: int) -> Outcome:
    """Five steps on two loaders together, of other batch sizes."""
    loaders = {"first": batches("byte_gpt", 1), "second": batches("byte_gpt", 2)}
    loader = CombinedLoader(loaders, "min_size")
    return train_module(functools.partial(turns.Siamese, "adamw"), loader, strategy, num_ranks)


def test_two_loaders_and_two_calls(ranks: Any) -> None:
    ours = ranks(2).run(combined, checked("pp_custom"), 2)[0]
    assert worst(ours, combined("auto", 1)) < TOLERANCE


# Calls from outside of a schedule ---------------------------------------------------------------------------------


def sampled(strategy: str, num_ranks: int) -> tuple[list[list[int]], dict[str, float]]:
    """What a fit has sampled in hooks and in validation, and logged."""
    torch.manual_seed(3)
    module = turns.Sampling("adamw")
    trainer = trainer_for(strategy, num_ranks, num_sanity_val_steps=1)
    trainer.fit(module, batches("byte_gpt", 1, 2), batches("byte_gpt", 1, 2))
    return module.sampled, {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize("strategy", ["pp_custom", "pp_custom:schedule=zbv", "pp_custom:schedule=turns"])
def test_sampling(ranks: Any, strategy: str) -> None:
    """Every rank gets the tokens of one process, from all calls of the module, and goes on with them."""
    tokens, logged = sampled("auto", 1)
    for ours, values in ranks(2).run(sampled, strategy, 2):
        assert ours == tokens
        assert values == pytest.approx(logged, abs=TOLERANCE)


def test_sampling_from_shards(ranks: Any) -> None:
    """A call gathers what is outside of the layers; all ranks make it."""
    tokens, _ = once(sampled_in_hooks, "auto", 1, 1)
    for ours, _ in ranks(4).run(sampled_in_hooks, "fsdp_custom:pipeline=2", 4, 2):
        assert ours == tokens


def sampled_in_hooks(strategy: str, num_ranks: int, readers: int) -> tuple[list[list[int]], dict[str, float]]:
    """The same without validation."""
    torch.manual_seed(3)
    module = turns.Sampling("adamw")
    trainer = trainer_for(strategy, num_ranks)
    trainer.fit(module, batches("byte_gpt", readers, 2))
    return module.sampled, {}


# Refusals ---------------------------------------------------------------------------------------------------------


class Shared(turns.Manual):
    """A layer has a parameter that is used outside, too."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.model.norm.weight = self.model.blocks[0].norm1.weight


class ByTorch(turns.Manual):
    """Clips by torch's own function."""

    def clip_gradients(self, *args: Any, **kwargs: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.5)


@pytest.mark.parametrize(
    ("kind", "strategy", "words"),
    [
        (turns.Manual, "pp_custom:microbatches=2", "to which microbatches=2 does not apply"),
        (turns.Manual, "pp_custom:schedule=gpipe,loss=batch", "schedule='gpipe', loss='batch' does not apply"),
        (turns.Deep, "pp_custom:schedule=turns,stages=time", "stages='time' does not apply"),
        (Shared, "pp_custom", "model.norm.weight is model.blocks.0.norm1.weight, too"),
    ],
)
def test_what_does_not_go_with_turns(kind: type[Case], strategy: str, words: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        fitted(kind, strategy, 2)
    assert words in str(refused.value)


def test_norms_of_one_stage_are_refused(ranks: Any) -> None:
    with pytest.raises(RankError) as refused:
        ranks(2).run(fitted, ByTorch, "pp_custom", 2)
    assert "call self.clip_gradients" in str(refused.value)


def test_an_order_that_shows_late_is_refused(ranks: Any) -> None:
    """The step reads a value before it calls the layers again, and no loss is tried that would show it."""
    with pytest.raises(RankError) as refused:
        ranks(2).run(fitted, turns.Refining, "pp_custom:loss=microbatch", 2)
    assert "called model.blocks.0 after model.blocks.3" in str(refused.value)
    assert "give schedule='turns'" in str(refused.value)


def test_a_line_says_so(ranks: Any) -> None:
    said = ranks(2).run(words_of, turns.Siamese, "pp_custom", 2)[0]
    assert "take turns from here on" in said


def test_a_line_says_what_needs_a_value(ranks: Any) -> None:
    said = ranks(2).run(words_of, turns.Routing, "pp_custom", 2)[0]
    assert "nonzero at " in said
    assert "turns.py:" in said
    assert "needs a value that a layer computes, before the last layer" in said
    assert "take turns from here on" in said


def words_of(kind: type[Case], strategy: str, num_ranks: int) -> str:
    """What a fit says of its schedule."""
    with mock.patch("lightning_parallel.strategies.pipelined_module.rank_zero_info") as info:
        fitted(kind, strategy, num_ranks)
    return "\n".join(call.args[0] for call in info.call_args_list)

"""Layers that take or make more than hidden states, as people write them: positions, masks, conditions, memories."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_parallel import ConfigurationError, build_strategy
from lightning_parallel.module.layer_stacks import find_layers
from lightning_parallel.techniques.tensor.plan import plan_tensor
from tests.data import batches
from tests.jobs.argument_nets import expected, trained
from tests.models.argument_layers import Counting, Plain
from tests.models.argument_nets import NETS, REFUSED_NETS, net
from tests.models.cases import LENGTH
from tests.parity import TOLERANCE, Outcome, make_trainer, train_module, worst
from tests.rank_pool import RankError


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("strategy", ["tp_custom", "cp_custom", "cp_custom:context_attention=ring", "pp_custom"])
def test_equal_to_one_process(ranks: Any, name: str, strategy: str) -> None:
    if (name, strategy) == ("decoder", "pp_custom"):
        strategy = "pp_custom:layers=layers"
    assert worst(ranks(2).run(trained, name, strategy, 2)[0], expected(name)) < TOLERANCE


@pytest.mark.parametrize(
    "strategy", ["tp_custom:sequence=true", "cp_custom:recompute=full", "cp_custom:compile=layers"]
)
@pytest.mark.parametrize("name", ["waves", "counting", "buffers", "hidden_by_name"])
def test_with_other_policies(ranks: Any, name: str, strategy: str) -> None:
    if name == "counting" and "compile" in strategy and torch.__version__ < "2.13":
        with pytest.raises(RankError, match=r"layers.0 \(Counting\) counts positions by torch.arange"):
            ranks(2).run(trained, name, strategy, 2)
        return
    assert worst(ranks(2).run(trained, name, strategy, 2)[0], expected(name)) < TOLERANCE


@pytest.mark.parametrize("name", ["complex", "conditioned", "learned"])
def test_with_tensor_and_context(ranks: Any, name: str) -> None:
    found = ranks(4).run(trained, name, "cp_custom:context=2,tensor=2", 4)[0]
    assert worst(found, expected(name)) < TOLERANCE


def compiled(strategy: str) -> Outcome:
    torch.compiler.reset()  # graphs of earlier tests in this process count to the limit
    # Under tensor, each layer is compiled for itself.
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit="tp_custom" not in strategy):
        return trained("twelve", f"{strategy}:compile=layers", 2)


@pytest.mark.parametrize("strategy", ["tp_custom", "cp_custom", "pp_custom"])
def test_a_deep_stack_is_compiled_once(ranks: Any, strategy: str) -> None:
    assert worst(ranks(2).run(compiled, strategy)[0], expected("twelve")) < TOLERANCE


def test_any_error_of_a_layer_on_a_part_lets_another_way_be_tried(ranks: Any) -> None:
    assert worst(ranks(2).run(trained, "picky", "cp_custom", 2)[0], expected("picky")) < TOLERANCE


def lengths_after_evaluations() -> list[int]:
    """What a rank has of the last of many batches, each of another length."""
    module = net(Counting, sizes=(LENGTH,))()
    tokens = torch.zeros(24, LENGTH, dtype=torch.long)
    seen: list[int] = []
    trainer = make_trainer(build_strategy("cp_custom"), 2)
    module.layers[-1].q.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
    batches = [(tokens[:2, :n],) for n in range(5, LENGTH + 1)]
    trainer.validate(module, DataLoader(batches, batch_size=None), verbose=False)  # type: ignore[arg-type]
    return seen[-1:]


def test_lengths_of_an_evaluation_do_not_pile_up(ranks: Any) -> None:
    assert ranks(2).run(lengths_after_evaluations) == [[LENGTH // 2]] * 2


def refusal(name: str, attention: str) -> str:
    try:
        train_module(REFUSED_NETS[name][0], batches("byte_gpt", 1), f"cp_custom:context_attention={attention}", 2)
    except ConfigurationError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("attention", ["ring", "ulysses"])
@pytest.mark.parametrize("name", REFUSED_NETS)
def test_positions_that_a_part_cannot_know_are_refused(ranks: Any, name: str, attention: str) -> None:
    message = ranks(2).run(refusal, name, attention)[0]
    assert REFUSED_NETS[name][1] in message, message


class Unknowable(Plain):
    def forward(self, x: Tensor, settings: Any, other: Any, third: Any, fourth: Any) -> Tensor:
        return self.whole(x, settings.of.some.kind(other, third, fourth))


def test_a_layer_that_no_guess_fits_waits_for_the_first_step_soon() -> None:
    module = net(Unknowable)()
    start = time.monotonic()
    plan = plan_tensor(module, find_layers(module), None, degree=2)
    assert time.monotonic() - start < 5
    assert plan.violations == []
    (unseen,) = plan.unseen
    assert unseen.reason.startswith("layers.0 (Unknowable) could not be run on hidden states, and what the names")
    assert "tensor_plan=" in unseen.reason

"""The first step of a fit is compared with one process: equal ones are told, others end the fit before an update."""

from __future__ import annotations

import functools
import re
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader, TensorDataset

from lightning_parallel import build_strategy
from lightning_parallel.callbacks.trials import isolated
from lightning_parallel.errors import ConfigurationError
from lightning_parallel.module.differences import Tolerance, gradient_differences, value_difference
from lightning_parallel.module.layer_check import LayerCheck
from lightning_parallel.strategies.first_step import FirstStep
from lightning_parallel.techniques.pipeline.unused_inputs import UnusedInputs
from tests.data import batches
from tests.jobs.first_steps import compared, ends_before_an_update, fit, said
from tests.models.cases import ByteGPT
from tests.models.faults import (
    AnyHooks,
    CannotBeCopiedOnRank0,
    FailsOnCopyOfRank0,
    GrowsOnRank0,
    LogsOneParameter,
    PenaltyOfLayers,
    ReadsShards,
    SumOfSamples,
    UnevenLabels,
    WithDropout,
)
from tests.models.losses import OwnGenerator
from tests.models.pipelined import OfCutGraph
from tests.models.tables import MODULES
from tests.models.unusual import SparseTable
from tests.models.user_code import Adapted, AdaptedByList, AdaptedByScript
from tests.names import num_ranks, num_readers
from tests.parity import TOLERANCE, make_trainer, once, train_module, worst

NAMES = [
    "ddp_custom",
    "zero1_custom",
    "zero2_custom",
    "fsdp_custom",
    "hsdp_custom",
    "cp_custom",
    "tp_custom",
    "fsdp_tp_custom",
    "pp_custom",
]


def run(ranks: Any, make: Any, case: str, strategy: str, **kwargs: Any) -> Any:
    name = strategy.partition(":")[0]
    size = num_ranks(name)
    return ranks(size).run(fit, make, case, strategy, size, num_readers(name, size), **kwargs)[0]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", ["deep_tied", "configure_model", "frozen_lora", "bert"])
def test_equal_under_every_name(ranks: Any, case: str, name: str) -> None:
    outcome, lines = run(ranks, MODULES[case], case, name)
    assert len(lines) == 1
    equal = re.fullmatch(r"first step equals one process: loss ([\d.]+) = ([\d.]+), (\d+) gradients", lines[0])
    assert equal is not None, lines
    assert equal[1] == equal[2]
    assert int(equal[3]) > 5
    # Comparing has changed nothing.
    assert worst(outcome, once(train_module, MODULES[case], batches(case, 1), "auto", 1)) < TOLERANCE


@pytest.mark.parametrize("name", ["ddp_custom", "fsdp_custom", "tp_custom", "pp_custom"])
def test_attributes_that_hooks_compute(ranks: Any, name: str) -> None:
    """A weight that is pruned has a graph, and such tensors cannot be copied."""
    outcome, lines = run(ranks, MODULES["pruned"], "byte_gpt", name)
    assert lines[0].startswith("first step equals one process")
    assert worst(outcome, once(train_module, MODULES["pruned"], batches("byte_gpt", 1), "auto", 1)) < TOLERANCE


@pytest.mark.parametrize(
    "strategy",
    ["fsdp_custom:accumulation_sync=last", "fsdp_custom:accumulation_sync=every", "ddp_custom", "pp_custom"],
)
def test_the_whole_window_is_compared(ranks: Any, strategy: str) -> None:
    _, lines = run(ranks, MODULES["byte_gpt"], "byte_gpt", strategy, accumulate_grad_batches=2)
    assert lines[0].startswith("first step equals one process")


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
@pytest.mark.parametrize("strategy", ["ddp_custom", "fsdp_custom", "tp_custom:recompute=full"])
def test_under_other_dtypes(ranks: Any, strategy: str, precision: str) -> None:
    _, lines = run(ranks, MODULES["byte_gpt"], "byte_gpt", strategy, precision=precision)
    assert lines[0].startswith("first step equals one process")


@pytest.mark.parametrize("name", ["ddp_custom", "fsdp_custom", "tp_custom"])
def test_hooks_run_on_the_copy_and_leave_nothing(ranks: Any, name: str) -> None:
    outcome, lines = run(ranks, AnyHooks, "byte_gpt", name)
    assert lines[0].startswith("first step equals one process")
    assert worst(outcome, once(train_module, AnyHooks, batches("byte_gpt", 1), "auto", 1)) < TOLERANCE


@pytest.mark.parametrize("strategy", ["ddp_custom", "fsdp_custom:accumulation_sync=every"])
def test_hooks_see_each_backward_of_a_window(ranks: Any, strategy: str) -> None:
    _, lines = run(ranks, AnyHooks, "byte_gpt", strategy, accumulate_grad_batches=2)
    assert lines[0].startswith("first step equals one process")


def test_sparse_gradients_are_compared(ranks: Any) -> None:
    _, lines = run(ranks, SparseTable, "byte_gpt", "ddp_custom", gradient_clip_val=None)
    assert lines[0].startswith("first step equals one process")


class HoldsData(ByteGPT):
    """Datasets in attributes, which would fill the memory if each rank copied them."""

    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__(optimizer)
        self.train_data, self.others = NeverCopied(torch.zeros(1)), [NeverCopied(torch.zeros(1))]
        self.loaders = {"train": DataLoader(self.train_data)}


class NeverCopied(TensorDataset):
    def __deepcopy__(self, memo: Any) -> Any:
        raise AssertionError("a dataset is not copied")


def test_data_is_not_copied(ranks: Any) -> None:
    _, lines = run(ranks, HoldsData, "byte_gpt", "fsdp_custom")
    assert lines[0].startswith("first step equals one process")


class LogsBehindBackward(Callback):
    """Logs through the module, as a hook of it would."""

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        pl_module.log("behind", 1.0)


def test_what_callbacks_log_is_not_compared(ranks: Any) -> None:
    _, lines = run(ranks, AnyHooks, "byte_gpt", "ddp_custom", watching=[LogsBehindBackward()])
    assert lines[0].startswith("first step equals one process")


def finding_none(strategy: str) -> tuple[str, list[str]]:
    """The error of a fit whose hook finds no gradients in the middle of a window, and what was warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        words = ends_before_an_update(AnyHooks, strategy, accumulate_grad_batches=2)
    return words, [str(each.message) for each in caught if "p.grad is None" in str(each.message)]


def test_hooks_that_find_no_gradients_end_the_fit(ranks: Any) -> None:
    """Gradients that are held until the last backward are not halved by a hook behind the first one."""
    words, told = ranks(2).run(finding_none, "fsdp_custom:accumulation_sync=last")[0]
    assert "gradients differ" in words
    assert "is logged" not in words
    assert len(told) == 1
    assert "or give accumulation_sync='every'" in told[0]


def test_a_hook_that_fails_on_the_copy_is_no_error(ranks: Any) -> None:
    _, lines = run(ranks, ReadsShards, "byte_gpt", "fsdp_custom")
    assert len(lines) == 1
    assert "not compared with one process: on_after_backward of a plain copy of the module raised Attrib" in lines[0]


@pytest.mark.parametrize(
    ("make", "strategy", "words"),
    [
        (SumOfSamples, "pp_custom:loss=microbatch", "the loss is"),
        (UnevenLabels, "pp_custom:loss=microbatch", "the loss is"),
    ],
)
def test_a_loss_that_is_another_one_ends_the_fit(ranks: Any, make: Any, strategy: str, words: str) -> None:
    """What ranks see of a batch is a part here, which nothing else notices."""
    found = ranks(2).run(ends_before_an_update, make, strategy)
    assert words in found[0]
    assert "in place of" in found[0]
    assert found[1] == "the first step differs from one process; rank 0 says how"


def without_the_layer_check(strategy: str) -> str:
    run_split = LayerCheck.run_split

    def finds_nothing(self: LayerCheck, *args: Any, **kwargs: Any) -> list[str]:
        run_split(self, *args, **kwargs)
        return []

    with mock.patch.object(LayerCheck, "run_split", finds_nothing):
        return ends_before_an_update(PenaltyOfLayers, strategy)


def test_a_penalty_of_layers_ends_the_fit_without_the_check_of_layers(ranks: Any) -> None:
    assert "the loss is" in ranks(2).run(without_the_layer_check, "cp_custom")[0]


def with_zeros_for_none(strategy: str) -> str:
    """Stages are not told which of their results get no gradient, and so send zeros back."""
    behind = UnusedInputs.behind
    with mock.patch.object(UnusedInputs, "behind", lambda *args: [False for _ in behind(*args)]):
        return ends_before_an_update(functools.partial(OfCutGraph, 3), strategy)


def test_gradients_of_zeros_where_one_process_has_none_end_the_fit(ranks: Any) -> None:
    """Weight decay would move what has them."""
    found = ranks(2).run(with_zeros_for_none, "pp_custom")
    assert "26 of 53 parameters have a gradient where one process has none: model." in found[0]


def without_one_gradient(strategy: str) -> str:
    before_update = FirstStep.before_update

    def loses(self: FirstStep) -> None:
        next(iter(self._strategy.module.parameters())).grad = None
        before_update(self)

    with mock.patch.object(FirstStep, "before_update", loses):
        return ends_before_an_update(MODULES["byte_gpt"], strategy)


def test_a_gradient_that_is_lost_ends_the_fit(ranks: Any) -> None:
    found = ranks(2).run(without_one_gradient, "ddp_custom")
    assert "1 of 41 parameters have no gradient where one process has one: model.tokens.weight" in found[0]


def without_reducing(strategy: str) -> str:
    with mock.patch("lightning_parallel.steps.reduce_gradients", return_value=None):
        return ends_before_an_update(MODULES["bare_parameter"], strategy)


def test_gradients_that_nobody_reduces_end_the_fit(ranks: Any) -> None:
    found = ranks(2).run(without_reducing, "fsdp_custom:layers=model.blocks")
    assert "gradients differ" in found[0]


def test_random_numbers_of_shared_samples_are_not_compared(ranks: Any) -> None:
    _, lines = run(ranks, WithDropout, "byte_gpt", "fsdp_custom")
    assert lines[0].startswith("first step equals one process")  # each rank draws as the copy does
    _, lines = run(ranks, WithDropout, "byte_gpt", "pp_custom")
    assert len(lines) == 1
    assert "not compared" in lines[0]
    assert "random" in lines[0]


def test_random_numbers_of_own_generators_are_random_too(ranks: Any) -> None:
    _, lines = run(ranks, OwnGenerator, "byte_gpt", "pp_custom")
    assert len(lines) == 1
    assert "random" in lines[0]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (Adapted, "first step equals one process: loss"),  # its hooks refer to the module, those of a copy to the copy
        (AdaptedByList, "first step equals one process: loss"),
        (AdaptedByScript, "its step uses 6 parameters of the module itself"),
    ],
)
def test_a_copy_whose_functions_belong_to_the_module_is_not_compared(ranks: Any, make: Any, words: str) -> None:
    outcome, lines = run(ranks, make, "byte_gpt", "ddp_custom")
    assert len(lines) == 1
    assert words in lines[0]
    assert worst(outcome, once(train_module, make, batches("byte_gpt", 1), "auto", 1)) < TOLERANCE


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (CannotBeCopiedOnRank0, "it cannot be copied"),
        (GrowsOnRank0, "hooks have added"),
        (FailsOnCopyOfRank0, "not the module itself"),
    ],
)
@pytest.mark.parametrize("name", ["ddp_custom", "fsdp_custom"])
def test_a_reason_of_one_rank_is_one_for_all(ranks: Any, name: str, make: Any, words: str) -> None:
    """Comparing is a collective: the others would wait."""
    outcome, lines = run(ranks, make, "byte_gpt", name)
    assert len(lines) == 1
    assert words in lines[0]
    assert worst(outcome, once(train_module, MODULES["byte_gpt"], batches("byte_gpt", 1), "auto", 1)) < TOLERANCE


def test_a_part_that_a_hook_logs_ends_the_fit(ranks: Any) -> None:
    found = ranks(2).run(ends_before_an_update, LogsOneParameter, "fsdp_custom")[0]
    assert "'part' is logged as" in found
    assert "'norm'" not in found
    assert "'read'" not in found


class TriesFirst(Callback):
    """Opens a trial, as searches do, and may leave it open."""

    def __init__(self, *, stays: bool) -> None:
        self.stays, self.states = stays, []  # type: ignore[var-annotated]

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        with isolated(trainer):
            self.states.append(trainer.strategy.first_step.is_paused)
        self.states.append(trainer.strategy.first_step.is_paused)
        trainer.strategy.first_step.is_paused = self.stays


def fit_after_a_trial(stays: bool) -> tuple[list[bool], int]:
    with said() as lines, compared():
        callback = TriesFirst(stays=stays)
        trainer = make_trainer(build_strategy("fsdp_custom"), 2, callbacks=[callback])
        trainer.fit(MODULES["byte_gpt"](), batches("byte_gpt", 2))
    return callback.states, len(lines)


def test_trials_are_not_compared(ranks: Any) -> None:
    """A search measures memory, of which the copy would take a part."""
    assert ranks(2).run(fit_after_a_trial, False)[0] == ([True, False], 1)
    assert ranks(2).run(fit_after_a_trial, True)[0] == ([True, False], 0)


def test_reasons_for_not_comparing_are_told(ranks: Any) -> None:
    _, lines = run(
        ranks, MODULES["byte_gpt"], "byte_gpt", "fsdp_custom:optimizer_in_backward=true", gradient_clip_val=None
    )
    (line,) = lines
    assert line.startswith("first step not compared with one process: optimizer_in_backward=True uses up each gradient")
    _, lines = run(ranks, MODULES["byte_gpt"], "byte_gpt", "fsdp_custom", check="off")
    assert lines == []


def test_one_process_is_the_reference_itself() -> None:
    with said() as lines, compared():
        train_module(MODULES["byte_gpt"], batches("byte_gpt", 1), "dp_custom", 1)
    assert lines == []


def test_an_unknown_check_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="check='always' is none of 'auto', 'first_step', 'off'"):
        build_strategy("fsdp_custom:check=always")


def test_distances() -> None:
    nan, inf = torch.tensor(float("nan")), torch.tensor(float("inf"))
    assert value_difference(1.0, 1.0) == 0.0
    assert value_difference(None, None) == 0.0
    assert value_difference(None, 1.0) == value_difference(nan, 1.0) == float("inf")
    assert value_difference(inf, inf) == 0.0
    assert value_difference(1.0, inf) == float("inf")
    tolerance = Tolerance(torch.finfo(torch.float32).eps)
    right = {"a": torch.ones(4), "b": torch.ones(4) * 1e-9}

    def apart(**wrong: torch.Tensor) -> list[str]:
        return list(gradient_differences({**right, **wrong}.__getitem__, right, tolerance))

    assert apart() == []
    assert apart(a=torch.zeros(4)) == ["a"]
    assert apart(a=torch.full((4,), float("nan"))) == ["a"]
    assert apart(b=torch.zeros(4)) == []  # rounding of the others

"""What happens around the steps: entry points, what is left afterwards, checkpoints, callbacks, loggers."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from lightning_parallel import full_state_dict
from tests.data import loader
from tests.jobs.fits import (
    accumulated,
    averaging,
    fit_and_validate,
    fit_module,
    messages,
    note_of,
    state_in_hooks,
    too_large_to_be_whole,
    unused_everywhere,
    used_on_one_rank,
)
from tests.jobs.lifecycle import (
    buffers_after_training,
    every_entry_point,
    fast_dev_run,
    fit_twice,
    forced_inference_mode,
    process_groups_after_each_fit,
    resume,
    save,
    uneven_prediction,
    with_everything_on,
)
from tests.models.cases import CASES, ByteGPT
from tests.models.stateful import WithGradientPenalty
from tests.models.unusual import (
    BuiltAfterChance,
    KeptInAList,
    OneRowOnOneRank,
    OptimizerInInit,
    PenaltyInTheLoss,
    ScriptedLayers,
    ScriptedPart,
    SparseTable,
    Stranger,
    Thawing,
    WithLBFGS,
    WithParameterHook,
    WithZeroRedundancy,
    WritesAfterValidation,
    WritesInTheStep,
)
from tests.names import SEPARATE, num_ranks, num_readers
from tests.parity import TOLERANCE, checked, difference, once, train_module, trainer_for


def run(ranks: Any, name: str, job: Any, *args: Any) -> Any:
    """`job` on the ranks that belong to `name`; rank 0's answer. One process for ``auto`` and ``dp_custom``."""
    if name in ("auto", "dp_custom"):
        return job(*args)
    return ranks(num_ranks(name)).run(job, *args)[0]


@pytest.mark.parametrize("case", ["byte_gpt", "hf_gpt2", "other_method", "configure_model", "lstm"])
@pytest.mark.parametrize("name", SEPARATE)
def test_every_entry_point(ranks: Any, name: str, case: str) -> None:
    reference = once(every_entry_point, "auto", 1, case)
    on_ranks = ranks(num_ranks(name)).run(every_entry_point, name, num_ranks(name), case)
    found = on_ranks[0]
    for key in ("before", "after", "test"):
        assert found[key][0] == pytest.approx(reference[key][0], abs=TOLERANCE)
    assert found["during"]["val_loss"] == pytest.approx(reference["during"]["val_loss"], abs=TOLERANCE)
    # A prediction is the mean loss of a batch, of which each rank has as many samples.
    predictions = torch.stack([each["predictions"] for each in on_ranks]).mean(0)
    assert torch.allclose(predictions, reference["predictions"], atol=TOLERANCE, rtol=0)
    assert len(predictions) == 3
    assert difference(found["weights"], reference["weights"]) <= TOLERANCE


def test_dp_has_every_entry_point() -> None:
    reference, found = once(every_entry_point, "auto", 1, "byte_gpt"), every_entry_point("dp_custom", 1)
    assert torch.equal(found["predictions"], reference["predictions"])
    assert difference(found["weights"], reference["weights"]) == 0


@pytest.mark.parametrize("name", ["fsdp_custom", "zero2_custom", "fsdp_offload_custom"])
def test_evaluation_before_training_under_inference_mode(ranks: Any, name: str) -> None:
    before, weights = ranks(2).run(forced_inference_mode, name, 2)[0]
    reference_before, reference_weights = once(forced_inference_mode, "auto", 1)
    assert before[0] == pytest.approx(reference_before[0], abs=TOLERANCE)
    assert difference(weights, reference_weights) <= TOLERANCE


@pytest.mark.parametrize("case", ["byte_gpt", "lstm", "hf_gpt2", "gan", "configure_model", "encoder_decoder"])
@pytest.mark.parametrize(
    ("first", "second"),
    [("fsdp_custom", "ddp_custom"), ("ddp_custom", "zero2_custom"), ("zero1_custom", "fsdp_custom")],
)
def test_nothing_is_left_and_another_name_goes_on(ranks: Any, first: str, second: str, case: str) -> None:
    reference = once(fit_twice, "auto", "auto", 1, case)
    on_ranks = ranks(2).run(fit_twice, first, second, 2, case)
    for found in on_ranks:
        assert found["marks"] == []
        assert all(found["same objects"])
        assert found["equal copies"]
    assert difference(on_ranks[0]["weights"], reference["weights"]) <= TOLERANCE


@pytest.mark.parametrize("name", [*SEPARATE, "fsdp_custom:pipeline=2", "fsdp_custom:context=2"])
def test_fitting_again_opens_no_process_groups(ranks: Any, name: str) -> None:
    """Each would keep threads and connections to the end of the process: hundreds of fits made a machine crawl."""
    for first, *later in ranks(4).run(process_groups_after_each_fit, name, 4):
        assert later == [first, first]


@pytest.mark.parametrize("name", ["auto", "dp_custom", *SEPARATE])
def test_checkpoints_resume_under_any_name(ranks: Any, tmp_path: Path, name: str) -> None:
    """Written under `name`; read by plain torch, plain Lightning and every other name, with equal results."""
    path = str(tmp_path / "saved.ckpt")
    uninterrupted = run(ranks, name, save, name, 1 if name in ("auto", "dp_custom") else num_ranks(name), path)
    reference = save("auto", 1, str(tmp_path / "reference.ckpt"))
    assert difference(uninterrupted, reference) <= TOLERANCE

    for written, expected in ((path, "reference.ckpt"), (f"{path}.end", "reference.ckpt.end")):
        ours = torch.load(written, weights_only=True)
        theirs = torch.load(tmp_path / expected, weights_only=True)
        assert difference(ours["state_dict"], theirs["state_dict"]) <= TOLERANCE
        _assert_same_optimizer(ours["optimizer_states"][0], theirs["optimizer_states"][0])
        assert ours["lr_schedulers"] == theirs["lr_schedulers"]
        assert ours["global_step"] == theirs["global_step"]

    readers = (
        ["auto", "ddp_custom", "zero1_custom", "fsdp_custom"]
        if name != "fsdp_custom"
        else ["auto", "dp_custom", *SEPARATE]
    )
    for reader in readers:
        resumed = run(ranks, reader, resume, reader, 1 if reader in ("auto", "dp_custom") else num_ranks(reader), path)
        assert difference(resumed, uninterrupted) <= TOLERANCE, reader


def _assert_same_optimizer(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours["param_groups"] == theirs["param_groups"]
    assert list(ours["state"]) == list(theirs["state"])
    for number, entries in theirs["state"].items():
        for key, value in entries.items():
            torch.testing.assert_close(ours["state"][number][key], value, atol=TOLERANCE, rtol=0)


def test_tied_weights_stay_one_tensor_in_the_file(ranks: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "tied.ckpt")
    ranks(2).run(save, "fsdp_custom", 2, path, "hf_gpt2")
    weights = torch.load(path, weights_only=True)["state_dict"]
    assert weights["model.lm_head.weight"].data_ptr() == weights["model.transformer.wte.weight"].data_ptr()
    module = CASES["hf_gpt2"]()
    module.load_state_dict(weights)


def test_deferred_modules_resume(ranks: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "deferred.ckpt")
    uninterrupted = ranks(2).run(save, "fsdp_custom", 2, path, "configure_model")[0]
    for name in ("fsdp_custom", "ddp_custom"):
        resumed = ranks(2).run(resume, name, 2, path, "configure_model")[0]
        assert difference(resumed, uninterrupted) <= TOLERANCE


@pytest.mark.parametrize("name", ["dp_custom", *SEPARATE])
def test_callbacks_and_loggers(ranks: Any, tmp_path: Path, name: str) -> None:
    reference = with_everything_on("auto", 1, str(tmp_path / "reference"))
    size = 1 if name == "dp_custom" else num_ranks(name)
    found = run(ranks, name, with_everything_on, name, size, str(tmp_path / "ours"))
    assert found["test"][0] == pytest.approx(reference["test"][0], abs=TOLERANCE)
    assert found["score"] == pytest.approx(reference["score"], abs=TOLERANCE)
    assert {k: found[k] for k in ("epochs", "best", "last", "rate")} == {
        k: reference[k] for k in ("epochs", "best", "last", "rate")
    }
    written = {p.relative_to(tmp_path / "ours").parts[0] for p in (tmp_path / "ours").rglob("*") if p.is_file()}
    assert written == {"checkpoints", "csv", "tensorboard"}
    best = tmp_path / "ours" / "checkpoints" / found["best"]
    plain = CASES["parameter_groups"].load_from_checkpoint(best, optimizer="sgd")
    assert isinstance(plain, L.LightningModule)


@pytest.mark.parametrize("name", SEPARATE)
def test_fast_dev_run(ranks: Any, name: str) -> None:
    assert run(ranks, name, fast_dev_run, name, num_ranks(name)) == 2


@pytest.mark.parametrize("name", ["fsdp_custom", "ddp_custom", "zero2_custom"])
@pytest.mark.parametrize(("num_samples", "batch_size"), [(5, 1), (6, 2), (9, 4)])
def test_prediction_of_uneven_data(ranks: Any, name: str, num_samples: int, batch_size: int) -> None:
    """No rank waits, no sample is predicted twice or left out, and each prediction is that of one process."""
    found = ranks(2).run(uneven_prediction, name, 2, num_samples, batch_size)
    for index, expected in enumerate(once(uneven_prediction, "auto", 1, num_samples, batch_size)):
        predicted = torch.cat([each[index] for each in found])
        assert len(predicted) == num_samples + index
        assert torch.allclose(predicted.sort().values, expected.sort().values, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", ["fsdp_custom", "zero2_custom", "zero1_custom"])
def test_batchnorm_statistics_are_those_of_ddp(ranks: Any, name: str) -> None:
    (ours, _), *_ = found = ranks(2).run(buffers_after_training, name, 2)
    theirs, _ = ranks(2).run(buffers_after_training, "ddp_custom", 2)[0]
    assert difference(ours, theirs) <= TOLERANCE
    assert [apart for _, apart in found] == [0.0, 0.0]


@pytest.mark.parametrize("name", SEPARATE)
def test_optimizer_made_in_init(ranks: Any, name: str) -> None:
    reference = once(fit_module, OptimizerInInit, "auto", 1)
    found = run(ranks, name, fit_module, OptimizerInInit, name, num_ranks(name))
    assert difference(found, reference) <= TOLERANCE


@pytest.mark.parametrize("name", SEPARATE)
def test_a_parameter_that_nobody_would_average_is_refused(ranks: Any, name: str) -> None:
    found = ranks(num_ranks(name)).run(messages, fit_module, Stranger, name, num_ranks(name))
    assert "trains 1 tensors that are no parameters of the module" in found[0][0]


@pytest.mark.parametrize("name", SEPARATE)
def test_full_state_dict_in_hooks(ranks: Any, name: str) -> None:
    reference = once(state_in_hooks, "auto", 1)
    found = ranks(num_ranks(name)).run(state_in_hooks, name, num_ranks(name))
    assert all(weights == {} for other in found[1:] for weights in other.values())
    for hook, weights in reference.items():
        assert difference(found[0][hook], weights) <= TOLERANCE
    assert difference(found[0]["train 1"], found[0]["train 2"]) > TOLERANCE  # what came later has not changed it


@pytest.mark.parametrize("name", SEPARATE)
@pytest.mark.parametrize("case", ["byte_gpt", "bare_parameter"])
def test_accumulation_equals_one_large_batch(ranks: Any, name: str, case: str) -> None:
    reference = once(accumulated, "auto", 1, case, 1)
    found = run(ranks, name, accumulated, name, num_ranks(name), case, 2)
    assert difference(found, reference) <= TOLERANCE


@pytest.mark.parametrize("name", ["zero2_custom", "fsdp_custom", "hsdp_custom"])
def test_unused_parameters(ranks: Any, name: str) -> None:
    reference = once(unused_everywhere, "auto", 1)
    assert difference(run(ranks, name, unused_everywhere, name, num_ranks(name)), reference) <= TOLERANCE


@pytest.mark.parametrize("name", ["zero2_custom", "fsdp_custom"])
def test_parameters_that_only_some_ranks_use(ranks: Any, name: str) -> None:
    theirs = ranks(2).run(used_on_one_rank, "ddp_custom:find_unused_parameters=true", 2)[0]
    assert difference(ranks(2).run(used_on_one_rank, name, 2)[0], theirs) <= TOLERANCE


@pytest.mark.parametrize("name", ["zero2_custom", "fsdp_custom"])
def test_a_row_that_one_rank_uses(ranks: Any, name: str) -> None:
    """All ranks decay the table and keep moments for it, also where their shard of its gradient is zero."""
    strategy = "ddp_custom:find_unused_parameters=true"
    theirs = ranks(2).run(fit_module, OneRowOnOneRank, strategy, 2)[0]
    assert difference(ranks(2).run(fit_module, OneRowOnOneRank, name, 2)[0], theirs) <= TOLERANCE


@pytest.mark.parametrize("name", SEPARATE)
def test_parameters_that_thaw_and_freeze_during_training(ranks: Any, name: str) -> None:
    reference = once(fit_module, Thawing, "auto", 1)
    assert difference(run(ranks, name, fit_module, Thawing, name, num_ranks(name)), reference) <= TOLERANCE


@pytest.mark.parametrize("name", SEPARATE)
def test_modules_built_after_random_numbers_were_drawn(ranks: Any, name: str) -> None:
    reference = once(fit_module, BuiltAfterChance, "auto", 1)
    found = run(ranks, name, fit_module, BuiltAfterChance, name, num_ranks(name))
    assert difference(found, reference) <= TOLERANCE


@pytest.mark.parametrize("name", SEPARATE)
def test_hooks_may_write_parameters_after_validation(ranks: Any, name: str) -> None:
    reference = once(fit_and_validate, WritesAfterValidation, "auto", 1)
    found = run(ranks, name, fit_and_validate, WritesAfterValidation, name, num_ranks(name))
    assert difference(found, reference) <= TOLERANCE


@pytest.mark.parametrize("name", ["zero1_custom", "zero2_custom", "fsdp_custom"])
def test_a_step_may_write_parameters(ranks: Any, name: str) -> None:
    reference = once(fit_module, WritesInTheStep, "auto", 1)
    assert difference(ranks(2).run(fit_module, WritesInTheStep, name, 2)[0], reference) <= TOLERANCE


@pytest.mark.parametrize("strategy", ["fsdp_custom", "zero2_custom", "fsdp_custom:recompute=full"])
def test_gradients_of_gradients_are_refused_under_sharding(ranks: Any, strategy: str) -> None:
    """Torch would read memory that it has freed, and the process would die."""
    for found in ranks(2).run(note_of, WithGradientPenalty, strategy, 2):
        assert "create_graph=True in a backward through model.blocks.0" in found
        assert "use ddp_custom or zero1_custom" in found


def test_gradients_of_gradients_where_parameters_are_whole(ranks: Any) -> None:
    found = ranks(2).run(fit_module, WithGradientPenalty, "zero1_custom", 2)[0]
    assert difference(found, fit_module(WithGradientPenalty, "auto", 1)) <= TOLERANCE


def test_reading_a_layer_from_outside(ranks: Any) -> None:
    reference = fit_module(PenaltyInTheLoss, "auto", 1)
    found = ranks(2).run(fit_module, PenaltyInTheLoss, "fsdp_custom:layers=[]", 2)[0]
    assert difference(found, reference) <= TOLERANCE


@pytest.mark.parametrize(
    ("job", "arguments", "words"),
    [
        (fit_module, (KeptInAList,), "kept outside of the modules that own them"),
        (fit_module, (WithParameterHook,), "have hooks of their own"),
        (fit_module, (SparseTable,), "sparse gradients cannot be sharded: model.tokens"),
        (fit_module, (ScriptedPart,), "the parameters of scripted modules are objects of C++"),
        (fit_module, (WithLBFGS,), "LBFGS keeps one history"),
        (fit_module, (WithZeroRedundancy,), "ZeroRedundancyOptimizer deals whole parameters out to the ranks"),
        (averaging, (), "StochasticWeightAveraging copies whole parameters"),
    ],
)
def test_what_cannot_be_sharded_is_refused_in_words(ranks: Any, job: Any, arguments: Any, words: str) -> None:
    found = ranks(2).run(messages, job, *arguments, "fsdp_custom", 2)
    assert words in found[0][0]


def saved_and_resumed(make: Any, strategy: str, size: int, folder: str) -> tuple[int, Any]:
    """The number of states in a checkpoint of two epochs, and the weights of a run that goes on from it to a fourth."""
    L.seed_everything(3, verbose=False)
    path = f"{folder}/of_{size}.ckpt"
    trainer = trainer_for(strategy, size, max_epochs=2)
    trainer.fit(make(), loader(num_readers(strategy, size)))
    trainer.save_checkpoint(path)
    states = torch.load(path, weights_only=False)["optimizer_states"]
    trainer = trainer_for(strategy, size, max_epochs=4)
    trainer.fit(make(), loader(num_readers(strategy, size)), ckpt_path=path)
    return len(states[0]["state"]), full_state_dict(trainer)


def test_an_optimizer_that_shards_itself_is_saved_and_goes_on(ranks: Any, tmp_path: Path) -> None:
    found = ranks(2).run(saved_and_resumed, WithZeroRedundancy, "ddp_custom", 2, str(tmp_path))[0]
    expected = saved_and_resumed(functools.partial(ByteGPT, "sgd"), "auto", 1, str(tmp_path))
    assert found[0] == expected[0]
    assert difference(found[1], expected[1]) <= TOLERANCE


def test_an_optimizer_that_shards_itself(ranks: Any) -> None:
    """It is refused by what shards optimizers, and trains where nothing else does."""
    found = ranks(2).run(messages, fit_module, WithZeroRedundancy, "zero1_custom", 2)
    assert "ZeroRedundancyOptimizer deals parameters out to the ranks as zero1_custom does" in found[0][0]
    trained = ranks(2).run(fit_module, WithZeroRedundancy, "ddp_custom", 2)[0]
    assert difference(trained, fit_module(functools.partial(ByteGPT, "sgd"), "auto", 1)) <= TOLERANCE


@pytest.mark.parametrize(
    ("make", "strategy"),
    [
        (ScriptedPart, "ddp_custom"),
        (ScriptedPart, "zero1_custom"),
        (ScriptedLayers, "ddp_custom"),
        (ScriptedLayers, "fsdp_custom"),
        (ScriptedLayers, "tp_custom"),
        (ScriptedLayers, "cp_custom"),
        (ScriptedLayers, "pp_custom"),
    ],
)
def test_scripted_modules_train(ranks: Any, make: Any, strategy: str) -> None:
    found = ranks(2).run(train_module, make, loader(num_readers(strategy, 2)), checked(strategy), 2)[0]
    expected = train_module(make, loader(1), "auto", 1)
    assert difference(found.final, expected.final) <= TOLERANCE


@pytest.mark.parametrize("strategy", ["fsdp_custom", "tp_custom"])
def test_anomaly_detection(ranks: Any, strategy: str) -> None:
    readers = num_readers(strategy, 2)
    found = ranks(2).run(train_module, ByteGPT, loader(readers), strategy, 2, detect_anomaly=True)[0]
    expected = train_module(ByteGPT, loader(1), "auto", 1)
    assert difference(found.final, expected.final) <= TOLERANCE


def test_a_module_too_large_to_be_whole_stays_sharded(ranks: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "large.ckpt")
    found = ranks(2).run(too_large_to_be_whole, 2, path)[0]
    assert (found["sharded"], found["plain"]) == ((True, "ByteGPT"), (False, "ByteGPT"))
    assert all("still sharded by an earlier fit" in violations[0] for violations in found["refused"].values())
    assert "reshard: always before, never now" in found["refused"]["zero2_custom"][0]
    assert "degrees: Degrees(" in found["refused"]["tp_custom"][0]
    assert len(found["validated"]) == 1
    reference = fit_module(functools.partial(ByteGPT, "adamw"), "auto", 1)
    assert list(found["first"]) == list(found["second"]) == list(reference)
    assert difference(torch.load(path, weights_only=True)["state_dict"], found["first"]) == 0
    assert difference(found["first"], reference) <= TOLERANCE

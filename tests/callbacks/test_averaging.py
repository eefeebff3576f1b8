"""The average equals one that is kept in one process, under every strategy, and leaves the weights alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_parallel import ConfigurationError, full_state_dict
from lightning_parallel.callbacks.averaging import ExponentialMovingAverage
from tests.data import loader
from tests.jobs.averages import DECAY, PlainAverage, assert_equal, fit_until, readers_of, reference_of, train
from tests.jobs.fits import messages
from tests.jobs.lifecycle import save
from tests.models.cases import CASES, ByteGPT
from tests.models.unusual import Thawing
from tests.parity import TOLERANCE, difference, trainer_for


def run(ranks: Any, strategy: str, job: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Rank 0's answer; `hsdp_custom` on four ranks, ``auto`` in this process."""
    if strategy == "auto":
        return job("auto", 1, *args, **kwargs)
    size = 4 if strategy == "hsdp_custom" else 2
    return ranks(size).run(job, strategy, size, *args, **kwargs)[0]


@pytest.mark.parametrize("case", ["byte_gpt", "hf_gpt2", "bare_parameter", "gan"])
@pytest.mark.parametrize(
    "strategy", ["auto", "ddp_custom", "zero1_custom", "zero2_custom", "fsdp_custom", "hsdp_custom"]
)
def test_equals_one_process(ranks: Any, strategy: str, case: str) -> None:
    accumulate = 1 if case == "gan" else 2  # Lightning does not accumulate under manual optimization
    reference = reference_of(case, accumulate)
    found = run(ranks, strategy, train, case, accumulate)
    assert_equal(found, reference)
    if case != "gan":
        assert len(found["val"]) == 3
        assert found["after"] == pytest.approx(reference["val"][-1], abs=TOLERANCE)
        assert difference(found["weights after"], found["weights"]) == 0


def test_only_rank_0_has_the_whole_average(ranks: Any) -> None:
    found = ranks(2).run(train, "fsdp_custom", 2, "byte_gpt")
    assert found[0]["average"] != {}
    assert found[1]["average"] == {}


@pytest.mark.parametrize("settings", [{"every_n_steps": 2, "start_step": 1}, {"start_step": 3}], ids=str)
@pytest.mark.parametrize("strategy", ["auto", "ddp_custom", "fsdp_custom"])
def test_some_steps_only(ranks: Any, strategy: str, settings: dict[str, int]) -> None:
    found = run(ranks, strategy, train, "byte_gpt", **settings)
    assert_equal(found, reference_of("byte_gpt", **settings))
    assert difference(found["average"], reference_of("byte_gpt")["average"]) > 1e-3


@pytest.mark.parametrize("strategy", ["auto", "ddp_custom", "fsdp_custom"])
def test_parameters_that_thaw_and_freeze(ranks: Any, strategy: str) -> None:
    """Equal to an average of all parameters from the first step on, though what is frozen costs nothing."""
    assert_equal(run(ranks, strategy, train, Thawing), reference_of(Thawing))


@pytest.mark.parametrize(
    ("writer", "readers"),
    [
        ("fsdp_custom", ["auto", "zero1_custom", "hsdp_custom"]),
        ("auto", ["fsdp_custom"]),
        ("ddp_custom", ["zero2_custom", "pp_custom"]),
        ("pp_custom", ["pp_custom", "fsdp_custom"]),
    ],
)
def test_resumes_under_any_strategy(ranks: Any, tmp_path: Path, writer: str, readers: list[str]) -> None:
    path = str(tmp_path / "saved.ckpt")
    whole = run(ranks, writer, fit_until, path, False)
    state = torch.load(path, weights_only=True)["callbacks"]["ExponentialMovingAverage"]
    assert state["steps"] == 3
    assert all(type(value) is Tensor for value in state["average"].values())
    for reader in readers:
        found = run(ranks, reader, fit_until, path, True)
        assert difference(found["average"], whole["average"]) <= TOLERANCE
        assert difference(found["weights"], whole["weights"]) <= TOLERANCE
        # the sanity check of the resumed run, and the test of the checkpoint, see the average of the checkpoint
        assert found["val"] == pytest.approx([whole["val"][0], whole["val"][1]], abs=TOLERANCE)
        assert found["test"] == pytest.approx(whole["val"][0], abs=TOLERANCE)


class SizeOfAverage(Callback):
    def __init__(self, average: ExponentialMovingAverage) -> None:
        self.average = average

    def on_train_end(self, *args: Any) -> None:
        tensors = self.average._average.tensors.values()
        self.local = sum((t.to_local() if isinstance(t, DTensor) else t).numel() for t in tensors)


def local_sizes(strategy: str, num_ranks: int) -> tuple[int, int]:
    """Elements of the average on this rank, and of the module."""
    average = ExponentialMovingAverage(DECAY)
    size = SizeOfAverage(average)
    module = ByteGPT("adamw")
    trainer_for(strategy, num_ranks, callbacks=[average, size]).fit(module, loader(num_ranks))
    return size.local, sum(p.numel() for p in module.parameters())


def test_each_rank_holds_its_share(ranks: Any) -> None:
    for strategy, size, shards in (("fsdp_custom", 2, 2), ("hsdp_custom", 4, 2), ("ddp_custom", 2, 1)):
        found = ranks(size).run(local_sizes, strategy, size)
        assert [local for local, _ in found] == [total // shards for _, total in found]


def in_bf16(strategy: str, num_ranks: int) -> dict[str, Any]:
    """With a decay at which nothing would move in 16 bits; a reference kept in 32 bits from the same weights."""
    L.seed_everything(3, verbose=False)
    average = ExponentialMovingAverage(0.999)
    kept: dict[str, Tensor] = {}
    first: dict[str, Tensor] = {}

    class Keep(Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
            weights = {name: value.float() for name, value in full_state_dict(trainer).items()}
            first.update({} if first else weights)
            kept.update({n: 0.999 * kept.get(n, v) + 0.001 * v for n, v in weights.items()})

    trainer = trainer_for(strategy, num_ranks, callbacks=[average, Keep()], precision="bf16-true")
    trainer.fit(ByteGPT("sgd"), loader(num_ranks, 6))
    state = average.state_dict()["average"]
    dtypes = {str(value.dtype) for value in average.full_state_dict(trainer).values()}
    return {"average": state, "reference": kept, "first": first, "dtypes": dtypes}


@pytest.mark.parametrize("strategy", ["auto", "ddp_custom", "fsdp_custom"])
def test_the_average_of_16_bit_parameters_has_32_bits(ranks: Any, strategy: str) -> None:
    found = run(ranks, strategy, in_bf16)
    assert difference(found["average"], found["reference"]) <= TOLERANCE
    assert difference(found["average"], found["first"]) > 1e-4
    assert found["dtypes"] == {"torch.bfloat16"}


class FailsInValidation(ByteGPT):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        if self.trainer.global_step >= 4:
            raise RuntimeError("validation failed")


class Shards(Callback):
    """This rank's own part of the parameters, where the callback under test has not been yet."""

    def on_validation_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.before = local_parameters(pl_module)


def local_parameters(module: L.LightningModule) -> list[Tensor]:
    return [(p.to_local() if isinstance(p, DTensor) else p).detach().clone() for p in module.parameters()]


def failing(strategy: str, num_ranks: int) -> tuple[bool, bool]:
    """Whether the average was in place when validation raised, and whether the weights are back afterwards."""
    L.seed_everything(3, verbose=False)
    module, shards, average = FailsInValidation("adamw"), Shards(), ExponentialMovingAverage(DECAY)
    seen: list[list[Tensor]] = []

    class Look(Callback):
        def on_validation_batch_start(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
            seen.append(local_parameters(pl_module))

    trainer = trainer_for(strategy, num_ranks, callbacks=[shards, average, Look()], val_check_interval=2)
    with pytest.raises(RuntimeError, match="validation failed"):
        trainer.fit(module, loader(num_ranks), loader(num_ranks, 2))
    now = local_parameters(module)
    is_swapped = not all(torch.equal(a, b) for a, b in zip(seen[-1], shards.before, strict=True))
    return is_swapped, all(torch.equal(a, b) for a, b in zip(now, shards.before, strict=True))


@pytest.mark.parametrize("strategy", ["auto", "ddp_custom", "zero2_custom", "fsdp_custom"])
def test_the_weights_are_back_after_an_error_in_validation(ranks: Any, strategy: str) -> None:
    found = [failing("auto", 1)] if strategy == "auto" else ranks(2).run(failing, strategy, 2)
    assert all(each == (True, True) for each in found)


def with_checkpoints(strategy: str, num_ranks: int, folder: str, weights_only: bool) -> dict[str, Any]:
    """Checkpoints by what validation says, then a test of the best one, and of another module."""
    L.seed_everything(3, verbose=False)
    average = ExponentialMovingAverage(DECAY)
    checkpoint = ModelCheckpoint(folder, monitor="val_loss", save_weights_only=weights_only)
    trainer = trainer_for(strategy, num_ranks, callbacks=[checkpoint, average], enable_checkpointing=True)
    module = ByteGPT("adamw")
    trainer.fit(module, loader(num_ranks), loader(num_ranks, 2))
    found: dict[str, Any] = {"val": trainer.callback_metrics["val_loss"].item(), "weights": full_state_dict(trainer)}
    found["best"] = trainer.test(module, loader(num_ranks, 2), ckpt_path="best", verbose=False)[0]["test_loss"]
    other = ByteGPT("adamw")
    found["other"] = trainer.test(other, loader(num_ranks, 2), verbose=False)[0]["test_loss"]
    plain = trainer_for(strategy, num_ranks)
    found["plain other"] = plain.test(other, loader(num_ranks, 2), verbose=False)[0]["test_loss"]
    found["plain"] = plain.test(module, loader(num_ranks, 2), verbose=False)[0]["test_loss"]
    return {**found, "path": checkpoint.best_model_path}


@pytest.mark.parametrize("weights_only", [False, True])
@pytest.mark.parametrize("strategy", ["auto", "zero1_custom", "fsdp_custom"])
def test_checkpoints_have_the_raw_weights(ranks: Any, tmp_path: Path, strategy: str, weights_only: bool) -> None:
    found = run(ranks, strategy, with_checkpoints, str(tmp_path), weights_only)
    file = torch.load(found["path"], weights_only=True)
    assert difference(file["state_dict"], found["weights"]) == 0
    assert abs(found["val"] - found["plain"]) > 1e-3
    # A checkpoint of weights alone has no average, and an average of other weights would be wrong.
    assert found["best"] == pytest.approx(found["plain"] if weights_only else found["val"], abs=TOLERANCE)
    assert found["other"] == pytest.approx(found["plain other"], abs=TOLERANCE)


def fit_again(first: str, second: str, num_ranks: int) -> dict[str, Any]:
    """The same module and callback, two epochs under two names."""
    L.seed_everything(3, verbose=False)
    average: Any = PlainAverage() if first == "reference" else ExponentialMovingAverage(DECAY)
    module = CASES["bare_parameter"]("sgd")
    for name in (first, second):
        trainer = trainer_for("auto" if name == "reference" else name, num_ranks, callbacks=[average])
        trainer.fit(module, loader(readers_of(name, num_ranks), 3, "bare_parameter"))
    return {"average": average.full_state_dict(trainer), "weights": full_state_dict(trainer)}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("fsdp_custom", "ddp_custom"),
        ("zero1_custom", "zero2_custom"),
        ("pp_custom", "fsdp_custom"),
        ("ddp_custom", "pp_custom"),
    ],
)
def test_a_later_fit_goes_on(ranks: Any, first: str, second: str) -> None:
    reference = fit_again("reference", "reference", 1)
    found = ranks(2).run(fit_again, first, second, 2)[0]
    assert difference(found["average"], reference["average"]) <= TOLERANCE
    assert difference(found["average"], found["weights"]) > 1e-3


def test_without_a_swap_validation_sees_the_weights() -> None:
    L.seed_everything(3, verbose=False)
    module = ByteGPT("adamw")
    trainer = trainer_for("auto", 1, callbacks=[ExponentialMovingAverage(DECAY, swap_for_validation=False)])
    trainer.fit(module, loader(1), loader(1, 2))
    plain = trainer_for("auto", 1).validate(module, loader(1, 2), verbose=False)
    assert trainer.callback_metrics["val_loss"].item() == pytest.approx(plain[0]["val_loss"], abs=TOLERANCE)


def test_settings_are_refused_in_words() -> None:
    with pytest.raises(ConfigurationError) as error:
        ExponentialMovingAverage(1.0, every_n_steps=0, start_step=-1)
    for words in ("decay=1.0 must be at least 0 and less than 1", "every_n_steps=0", "start_step=-1"):
        assert words in str(error.value)


@pytest.mark.parametrize("strategy", ["auto", "fsdp_custom"])
def test_an_average_of_another_module_is_refused(ranks: Any, tmp_path: Path, strategy: str) -> None:
    path = str(tmp_path / "other.ckpt")
    save("auto", 1, path, "bare_parameter")
    saved = torch.load(path, weights_only=True)
    saved["callbacks"]["ExponentialMovingAverage"] = {
        "average": {"gone": torch.zeros(2), "bias": torch.zeros(3)},
        "steps": 1,
    }
    torch.save(saved, path)
    size = 1 if strategy == "auto" else 2
    arguments = (messages, resume_other, strategy, size, path)
    found = messages(*arguments[1:]) if strategy == "auto" else ranks(2).run(*arguments)[0]
    assert "averages gone, which the module lacks" in found[0]
    assert "averages bias of shape (3,), the module's is (32,)" in found[1]


def resume_other(strategy: str, num_ranks: int, path: str) -> None:
    trainer = trainer_for(strategy, num_ranks, max_epochs=2, callbacks=[ExponentialMovingAverage(DECAY)])
    trainer.fit(CASES["bare_parameter"]("adamw"), loader(num_ranks, 3, "bare_parameter"), ckpt_path=path)


def test_optimizers_that_lightning_does_not_count_are_reported() -> None:
    class Uncounted(ByteGPT):
        def __init__(self) -> None:
            super().__init__("sgd")
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.manual_backward(self.loss(*batch))
            self.optimizers(use_pl_optimizer=False).step()

    trainer = trainer_for("auto", 1, callbacks=[ExponentialMovingAverage(DECAY)])
    with pytest.warns(UserWarning, match="averaged nothing, because trainer.global_step stayed 0"):
        trainer.fit(Uncounted(), loader(1))

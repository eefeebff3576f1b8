"""Pipelines around the steps: entry points, metrics, checkpoints, the module afterwards."""

from __future__ import annotations

import copy
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import CatMetric, MeanMetric

from lightning_parallel import build_strategy, full_state_dict
from lightning_parallel.callbacks import GradientNorm
from tests.data import GLOBAL_BATCH, batches, data_of
from tests.jobs.lifecycle import marks
from tests.models.cases import next_token_loss
from tests.models.pipelined import Deep, DeepTied
from tests.models.tables import PIPELINE_MODULES
from tests.parity import TOLERANCE, Outcome, Recorder, difference, make_trainer, worst


class Metered(DeepTied):
    """Logs in every way, and has metrics."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.accuracy = MeanMetric()
        self.val_loss = MeanMetric()
        self.losses = CatMetric()

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        logits = self(batch[0])
        loss = next_token_loss(logits, batch[0])
        right = (logits[:, :-1].argmax(-1) == batch[0][:, 1:]).float()
        self.accuracy.update(right)
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        self.log_dict({"loss": loss, "right": right.mean()}, on_step=True, on_epoch=True, prog_bar=True, sync_dist=True)
        self.log("samples", float(len(batch[0])), on_epoch=True, on_step=False, reduce_fx="sum", sync_dist=True)
        self.log("most", right.mean(1).max(), on_epoch=True, on_step=False, reduce_fx="max", sync_dist=True)
        return {"loss": loss, "logits": logits.detach()}

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self(batch[0])
        loss = next_token_loss(logits, batch[0])
        self.val_loss.update(loss, weight=len(batch[0]))
        self.losses.update(logits.mean((1, 2)))
        self.log("val_metric", self.val_loss)
        self.log("val_loss", loss, sync_dist=True)
        return loss

    def on_validation_epoch_end(self) -> None:
        losses = self.losses.compute()
        self.log_dict({"num_samples": float(len(losses)), "spread": losses.std()})
        self.losses.reset()

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])


def lifecycle(strategy: str, num_ranks: int, num_readers: int, folder: str) -> dict[str, Any]:
    """Validate, fit with validation and callbacks, test and predict, with the same objects and ragged last batches."""
    L.seed_everything(3, verbose=False)
    module = Metered()
    norms: list[float] = []
    outputs: list[Tensor] = []

    class Notes(L.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, out: Any, *args: Any) -> None:
            norms.append(float(trainer.callback_metrics["grad_norm"]))
            outputs.append(out["logits"])

    built = strategy if strategy == "auto" else build_strategy(strategy)
    best = ModelCheckpoint(folder, monitor="val_loss", filename="best-{epoch}")
    stops = EarlyStopping("val_loss", patience=1)
    trainer = make_trainer(
        built, num_ranks, num_sanity_val_steps=1, max_epochs=2, enable_checkpointing=True, inference_mode=False,
        callbacks=[GradientNorm(), Notes(), best, stops],
    )  # fmt: skip
    loader = batches("byte_gpt", num_readers)
    ragged = DataLoader(data_of("byte_gpt", 21, GLOBAL_BATCH), batch_size=GLOBAL_BATCH)
    found: dict[str, Any] = {"before": trainer.validate(module, ragged, verbose=False)}
    trainer.fit(module, loader, ragged)
    found["during"] = {name: float(value) for name, value in trainer.callback_metrics.items()}
    found["test"] = trainer.test(module, ragged, verbose=False)
    found["predictions"] = torch.cat(trainer.predict(module, ragged))
    found["norms"], found["best"] = norms, float(best.best_model_score)
    found["outputs"] = torch.cat(outputs)
    found["plain"] = type(module.model.blocks[0]).__module__ == "tests.models.cases" and "training_step" not in vars(
        module
    )
    found["weights"] = dict(module.state_dict())
    return found


def test_every_entry_point(ranks: Any, tmp_path: Any) -> None:
    expected = lifecycle("auto", 1, 1, str(tmp_path / "one"))
    for ours in ranks(2).run(lifecycle, "pp_custom", 2, 1, str(tmp_path / "two")):
        assert ours["plain"]
        for name in ("before", "test"):
            assert ours[name][0] == pytest.approx(expected[name][0], abs=TOLERANCE)
        for name in ("during", "norms", "best"):
            assert ours[name] == pytest.approx(expected[name], abs=TOLERANCE), name
        for name in ("predictions", "outputs"):
            assert torch.allclose(ours[name], expected[name], atol=1e-4), name
        assert all(torch.allclose(ours["weights"][k], v, atol=TOLERANCE) for k, v in expected["weights"].items())


def saved_in_validation(strategy: str, num_ranks: int, path: str) -> None:
    """A checkpoint that a hook of `validate` writes after a fit."""

    class Saves(L.Callback):
        def on_validation_end(self, trainer: Any, module: Any) -> None:
            trainer.save_checkpoint(path)

    L.seed_everything(3, verbose=False)
    module = Deep()
    trainer = make_trainer(strategy if strategy == "auto" else build_strategy(strategy), num_ranks)
    trainer.fit(module, batches("byte_gpt", 1))
    trainer.callbacks.append(Saves())
    trainer.validate(module, batches("byte_gpt", 1), verbose=False)


def test_a_checkpoint_of_validation(ranks: Any, tmp_path: Any) -> None:
    paths = [str(tmp_path / name) for name in ("one.ckpt", "two.ckpt")]
    saved_in_validation("auto", 1, paths[0])
    ranks(2).run(saved_in_validation, "pp_custom", 2, paths[1])
    one, two = (torch.load(path, weights_only=False)["optimizer_states"][0]["state"] for path in paths)
    assert one.keys() == two.keys()
    for number, state in one.items():
        assert torch.allclose(two[number]["exp_avg"], state["exp_avg"], atol=TOLERANCE)


def resumed(strategy: str, num_ranks: int, num_readers: int, path: str) -> Outcome:
    """One epoch, a checkpoint, and a second epoch from it with a fresh module and other first weights."""
    for epochs, seed, checkpoint in ((1, 3, None), (2, 4, path)):
        L.seed_everything(seed, verbose=False)
        recorder = Recorder()
        built = strategy if strategy == "auto" else build_strategy(strategy)
        trainer = make_trainer(built, num_ranks, callbacks=[recorder], max_epochs=epochs)
        trainer.fit(PIPELINE_MODULES["head_first"](), batches("head_first", num_readers), ckpt_path=checkpoint)
        trainer.save_checkpoint(path)
    recorder.outcome.final = full_state_dict(trainer)
    return recorder.outcome


def test_resume(ranks: Any, tmp_path: Any) -> None:
    expected = resumed("auto", 1, 1, str(tmp_path / "one.ckpt"))
    ours = ranks(4).run(resumed, "fsdp_custom:pipeline=2", 4, 2, str(tmp_path / "two.ckpt"))[0]
    assert worst(ours, expected) < TOLERANCE
    one, two = (torch.load(tmp_path / name, weights_only=False) for name in ("one.ckpt", "two.ckpt"))
    assert one["optimizer_states"][0]["state"].keys() == two["optimizer_states"][0]["state"].keys()
    for number, state in one["optimizer_states"][0]["state"].items():
        for name, value in state.items():
            theirs = two["optimizer_states"][0]["state"][number][name]
            assert torch.allclose(torch.as_tensor(value), torch.as_tensor(theirs), atol=TOLERANCE)


def fitted_twice(first: str, second: str, case: str) -> dict[str, Any]:
    """Fit under one name, look at the module, fit it under another, and give it away trained."""
    L.seed_everything(3, verbose=False)
    module, plain = PIPELINE_MODULES[case]("adamw"), PIPELINE_MODULES[case]("adamw")
    if case == "configure_model":
        plain.configure_model()
    objects = list(module.parameters())
    make_trainer(build_strategy(first), 2).fit(module, batches(case, 1, 3))
    found: dict[str, Any] = {
        "marks": [a for a, b in zip(marks(module), marks(plain), strict=True) if a != b],
        "same objects": [a is b for a, b in zip(module.parameters(), objects, strict=False)],
        "copies": all(torch.equal(v, copy.deepcopy(module).state_dict()[k]) for k, v in module.state_dict().items()),
    }
    readers = 1 if "pp_custom" in second else 2
    trainer = make_trainer(build_strategy(second), 2)
    trainer.fit(module, batches(case, readers, 3))
    found["weights"] = full_state_dict(trainer)
    return found


@pytest.mark.parametrize("case", ["hf_gpt2", "head_first", "configure_model"])
@pytest.mark.parametrize(("first", "second"), [("pp_custom", "ddp_custom"), ("pp_custom:microbatches=2", "pp_custom")])
def test_the_module_is_plain_afterwards(ranks: Any, first: str, second: str, case: str) -> None:
    expected = ranks(2).run(fitted_twice, "cp_custom", "fsdp_custom", case)[0]["weights"]
    for found in ranks(2).run(fitted_twice, first, second, case):
        assert found["marks"] == []
        assert all(found["same objects"])
        assert found["copies"]
        if found["weights"]:
            assert difference(found["weights"], expected) < TOLERANCE

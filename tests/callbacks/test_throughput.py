"""`Throughput` against counts and formulas by hand, under every name."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_parallel import ConfigurationError, _torch
from lightning_parallel.callbacks import Throughput
from lightning_parallel.presets import PRESETS
from tests.data import data_of, loader
from tests.jobs.meters import Noted
from tests.models.cases import LENGTH, ByteGPT, LSTMModel
from tests.names import num_ranks, num_readers
from tests.parity import checked, trainer_for

DEPTH, WIDTH = 3, 16
MATRICES = sum(p.numel() for name, p in ByteGPT().named_parameters() if p.ndim == 2 and "model.tokens" not in name)
MATRICES -= ByteGPT().model.positions.weight.numel()
FORMULA = 6 * MATRICES + 12 * DEPTH * WIDTH * LENGTH
"""FLOPs of a token: PaLM, appendix B, with the matrices that are multiplied."""
SCORES = 2 * DEPTH * WIDTH * LENGTH
"""FLOPs with which the backward of fused attention computes its scores once more."""


def metered(
    strategy: str,
    size: int,
    data: Any = None,
    make: Any = ByteGPT,
    *,
    every: int = 2,
    readers: int | None = None,
    **kwargs: Any,
) -> dict[str, Any]:
    """A fit; what was logged in the end, FLOPs for each token, and what the user's module has logged."""
    L.seed_everything(3, verbose=False)
    meter, logger = Throughput(every=every, peak=1e12), Noted()
    callbacks = [meter, *kwargs.pop("callbacks", [])]
    trainer = trainer_for(strategy, size, callbacks=callbacks, logger=logger, **kwargs)
    module = make()
    readers = readers or num_readers(strategy.partition(":")[0], size)
    trainer.fit(module, loader(readers, 4) if data is None else data)
    latest = meter.latest
    rate = latest.get("throughput/tokens_per_sec", float("nan"))
    return {
        "latest": latest,
        "rows": logger.rows,
        "model": latest.get("throughput/flops_per_sec", float("nan")) / rate,
        "hardware": latest.get("throughput/hardware_flops_per_sec", float("nan")) / rate,
        "metrics": sorted(trainer.callback_metrics),
    }


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("name", ["auto", *PRESETS])
def test_counts_and_flops_of_every_name(ranks: Any, name: str, check: bool) -> None:
    """Each sample once; FLOPs are those of the formula, whatever ranks share, with the proof of the first step on."""
    size = 1 if name in ("auto", "dp_custom") else num_ranks(name)
    strategy = checked(name) if check and name != "auto" else name
    results = [metered(strategy, 1)] if size == 1 else ranks(size).run(metered, strategy, size)
    splits = name in ("cp_custom", "tp_custom", "fsdp_tp_custom")
    for found in results:
        assert found["latest"]["throughput/samples"] == 4 * 8
        assert found["latest"]["throughput/tokens"] == 4 * 8 * LENGTH
        assert found["metrics"] == ["train_loss"]
        if splits and not check:  # never a wrong number
            assert "throughput/flops_per_sec" not in found["latest"]
            continue
        assert found["model"] == pytest.approx(FORMULA, rel=1e-9)
        assert found["hardware"] == pytest.approx(FORMULA + SCORES, rel=1e-9)
        latest = found["latest"]
        rate = latest["throughput/flops_per_sec"]
        assert latest["throughput/device/flops_per_sec"] == pytest.approx(rate / size)
        assert latest["throughput/mfu"] == pytest.approx(rate / size / 1e12)
    assert [len(found["rows"]) > 0 for found in results] == [rank == 0 for rank in range(size)]


TABLE = json.loads((Path(__file__).parents[1] / "matrices" / "product_matrix.json").read_text())
PRODUCTS = [name for name, cell in TABLE["cells"]["byte_gpt"].items() if name not in PRESETS and cell == "runs"]


@pytest.mark.parametrize("name", PRODUCTS)
def test_counts_and_flops_of_products(ranks: Any, name: str) -> None:
    """Of the second matrix: MFU is that of the formula within its digits, and tokens are exact."""
    size, readers = TABLE["layouts"][name]["ranks"], TABLE["layouts"][name]["readers"]
    for found in ranks(size).run(metered, checked(name), size, readers=readers):
        latest = found["latest"]
        assert latest["throughput/samples"] == 4 * 8
        assert latest["throughput/tokens"] == 4 * 8 * LENGTH
        mfu = FORMULA * latest["throughput/tokens_per_sec"] / size / 1e12
        assert latest["throughput/mfu"] == pytest.approx(mfu, rel=1e-9)


@pytest.mark.parametrize("name", ["fsdp_custom", "tp_custom", "ddp_custom"])
def test_recomputed_flops_are_those_of_hardware(ranks: Any, name: str) -> None:
    """Layers are computed once more, but for their last product, which backward does not need; the head is not."""
    found = ranks(2).run(metered, checked(f"{name}:recompute=full"), 2)[0]
    assert found["model"] == pytest.approx(FORMULA, rel=1e-9)
    head = 32 * WIDTH
    again = 2 * (MATRICES - head) + 4 * DEPTH * WIDTH * LENGTH
    assert again * 0.6 < found["hardware"] - FORMULA - SCORES <= again * 1.0001


def ragged(strategy: str, size: int) -> dict[str, Any]:
    """Two epochs of three batches of 4 samples and one of 2 for each reader, in windows of two, and validation."""
    readers = num_readers(strategy, size) if strategy != "auto" else 1
    rows = data_of("byte_gpt", 14 * readers, 8)
    return metered(
        strategy,
        size,
        DataLoader(rows, batch_size=4),
        accumulate_grad_batches=2,
        max_epochs=2,
        every=3,
    )


@pytest.mark.parametrize("name", ["auto", "ddp_custom", "fsdp_custom", "pp_custom"])
def test_short_batches_and_accumulation(ranks: Any, name: str) -> None:
    size = 1 if name == "auto" else 2
    found = ragged(name, 1) if size == 1 else ranks(2).run(ragged, name, 2)[0]
    total = 2 * 14 * (1 if name == "auto" else num_readers(name, size))
    assert found["latest"]["throughput/samples"] == total
    assert found["latest"]["throughput/tokens"] == total * LENGTH
    assert found["model"] == pytest.approx(FORMULA, rel=1e-9)


class Slow(ByteGPT):
    """Trains in no time and validates for long."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        time.sleep(0.3)


def test_validation_is_no_training_time() -> None:
    L.seed_everything(3, verbose=False)
    meter = Throughput(every=100, flops=False)
    trainer = trainer_for("auto", 1, callbacks=[meter], val_check_interval=2)
    trainer.fit(Slow(), loader(1, 8), loader(1, 1))
    assert 7 / meter.latest["throughput/steps_per_sec"] < 0.3


def resumed(strategy: str, size: int, path: str) -> list[float]:
    """Samples and FLOPs of a token at the end of a run, and of one that goes on from its middle."""

    class Save(Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
            if trainer.global_step == 5:
                trainer.save_checkpoint(path)

    found = metered(checked(strategy), size, max_epochs=2, every=3, callbacks=[Save()])
    L.seed_everything(3, verbose=False)
    meter = Throughput(every=1, peak=1e12)
    trainer = trainer_for(strategy, size, callbacks=[meter], max_epochs=2)
    trainer.fit(ByteGPT(), loader(num_readers(strategy, size), 4), ckpt_path=path)
    latest = meter.latest
    flops = latest["throughput/flops_per_sec"] / latest["throughput/tokens_per_sec"]
    return [found["latest"]["throughput/samples"], latest["throughput/samples"], flops]


@pytest.mark.parametrize("name", ["fsdp_custom", "tp_custom"])
def test_a_run_that_resumes_counts_on(ranks: Any, tmp_path: Path, name: str) -> None:
    whole, again, flops = ranks(2).run(resumed, name, 2, str(tmp_path / "middle.ckpt"))[0]
    assert whole == again == 2 * 4 * 8
    assert flops == pytest.approx(FORMULA, rel=1e-9)


def test_steps_that_differentiate_twice_and_checkpoint_by_themselves() -> None:
    linear = torch.nn.Linear(4, 4, bias=False)
    y = torch.randn(2, 4, requires_grad=True)

    def penalty(y: Any) -> Any:
        return torch.autograd.grad(linear(linear(y)).sum(), y, create_graph=True)[0]

    with _torch.flops.FlopCount() as plain:
        penalty(y).square().sum().backward()
    with _torch.flops.FlopCount() as again:
        checkpoint(penalty, y, use_reentrant=False).square().sum().backward()
    assert plain.again == 0
    assert again.model == plain.model > 0
    assert again.again == 4 * 2 * 2 * 4 * 4


def said(caplog: pytest.LogCaptureFixture, run: Any) -> list[str]:
    with caplog.at_level(logging.INFO, "lightning.pytorch.utilities.rank_zero"):
        run()
    return [record.getMessage() for record in caplog.records if record.getMessage().startswith("Throughput")]


class Broken(Noted):
    def log_metrics(self, *args: Any, **kwargs: Any) -> None:
        raise OSError("no space left")


def test_what_does_not_work_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    def run() -> None:
        callbacks = [Throughput(every=1)]
        trainer_for("auto", 1, callbacks=callbacks, logger=Broken()).fit(LSTMModel(), loader(1, 4))

    messages = said(caplog, run)
    assert len(messages) == len(set(messages)) == 3
    assert any("the peak of cpu in 32-true is not known; give peak=" in each for each in messages)
    assert any("Broken cannot log: OSError: no space left" in each for each in messages)
    assert any("torch has no formula for mkldnn_rnn_layer" in each for each in messages)


def test_tokens_by_a_function_or_a_key() -> None:
    for options in ({"tokens": lambda batch: 5 * len(batch[0])}, {"key": 0}):
        meter = Throughput(every=1, flops=False, **options)
        trainer_for("auto", 1, callbacks=[meter]).fit(ByteGPT(), loader(1, 2))
        assert meter.latest["throughput/tokens"] == 2 * 8 * (LENGTH if "key" in options else 5)
    for options, words in (
        ({"key": "labels"}, "the batch is a list without it; give another key"),
        ({"tokens": lambda batch: "many"}, "returned a str; return an int"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            trainer_for("auto", 1, callbacks=[Throughput(**options)]).fit(ByteGPT(), loader(1, 2))
    with pytest.raises(ConfigurationError, match=r"every=0\) is no number of updates") as caught:
        Throughput(every=0, tokens=len, key=0, peak=-1.0)
    assert len(caught.value.violations) == 3

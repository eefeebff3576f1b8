"""Lightning's own tests pass under ours where they pass under stock `ddp`. They run where a checkout is named."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import pytest

from tests.lightning_suite.__main__ import STOCK
from tests.lightning_suite.comparison import FAILED, Accepted, Comparison, Suite
from tests.lightning_suite.outcomes import Outcome, run

CHECKOUT = "LIGHTNING_CHECKOUT"

# With a checkout ------------------------------------------------------------------------------------------------------


@cache
def outcomes(name: str, folder: Path, start_ranks: bool) -> dict[str, Outcome]:
    return Suite.read().run(Path(os.environ[CHECKOUT]), name, folder, start_ranks=start_ranks)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("outcomes")


@pytest.mark.slow
@pytest.mark.skipif(CHECKOUT not in os.environ, reason=f"{CHECKOUT} names no checkout of Lightning")
@pytest.mark.parametrize("start_ranks", [False, True])
@pytest.mark.parametrize("name", ["ddp_custom", "fsdp_custom"])
def test_lightning_passes_its_own_tests(name: str, folder: Path, start_ranks: bool) -> None:
    stock, ours = (outcomes(each, folder, start_ranks) for each in (STOCK, name))
    found = Comparison(name, stock, ours, Suite.read().accepted)
    assert not found.unexplained, found.report()
    assert not found.obsolete, found.report()


# Without one ----------------------------------------------------------------------------------------------------------

LIKE_LIGHTNINGS = """
import os, signal
import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

def trainer(**kwargs):
    return Trainer(accelerator="cpu", logger=False, barebones=False, **kwargs)

def test_default():
    assert type(trainer(devices=1).strategy).__module__.startswith("lightning_parallel.")

def test_named():
    assert type(trainer(devices=1, strategy="ddp").strategy).__module__.startswith("lightning.pytorch.")

def test_ends_the_process():
    os.kill(os.getpid(), signal.SIGKILL)

@pytest.mark.flaky(reruns=3)
def test_after():
    assert trainer(devices=1).strategy is not trainer(devices=1).strategy

@pytest.mark.skip
def test_skipped():
    pass

@pytest.mark.parametrize("named", [{"strategy": "ddp_spawn", "devices": 1}, {"devices": 2}])
def test_starts_processes(named):
    trainer(**named).fit(BoringModel())

@pytest.fixture
def broken():
    yield
    raise RuntimeError("left behind")

def test_broken(broken):
    pass
"""


@pytest.mark.slow
def test_the_default_is_replaced_and_outcomes_are_noted(tmp_path: Path) -> None:
    (tests := tmp_path / "checkout/tests/tests_pytorch").mkdir(parents=True)
    (tests / "test_it.py").write_text(LIKE_LIGHTNINGS)
    ours, stock = (run(tmp_path / "checkout", name, ["."], tmp_path / name) for name in ("fsdp_custom", STOCK))
    kinds = {test.partition("::test_")[2]: outcome.kind for test, outcome in ours.items()}
    ends = {"default": "passed", "named": "passed", "ends_the_process": "died", "after": "passed"}
    skipped = {"skipped": "skipped", "starts_processes[named0]": "skipped", "starts_processes[named1]": "skipped"}
    assert kinds == {**ends, **skipped, "broken": "failed"}
    assert "left behind" in ours["test_it.py::test_broken"].error
    assert {t for t in stock if stock[t] != ours[t]} == {"test_it.py::test_default"}


OF_RANKS = """
import os
import pytest
from lightning.fabric.utilities.distributed import _destroy_dist_connection
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import testing

@pytest.fixture(autouse=True)
def as_lightnings_conftest_does():
    before = dict(os.environ)
    yield
    _destroy_dist_connection()
    os.environ.clear()
    os.environ.update(before)

class Model(BoringModel):
    def on_train_start(self):
        assert self.trainer.world_size == 2
        assert type(self.trainer.strategy).__module__.startswith("lightning_parallel.")

def fit(strategy, model=Model, **kwargs):
    trainer = Trainer(strategy=strategy, logger=False, fast_dev_run=True, enable_model_summary=False, **kwargs)
    trainer.fit(model())
    return trainer

@pytest.mark.skipif(bool(testing._runif_reasons(min_cuda_gpus=2, standalone=True)[0]), reason="needs two GPUs")
@pytest.mark.parametrize("strategy", ["ddp", "ddp_spawn", DDPStrategy()])
def test_two(strategy):
    fit(strategy, accelerator="gpu", devices=[0, 1])

def test_further_rank():
    assert fit("ddp", accelerator="cpu", devices=2).global_rank == 0, "only there"
"""


@pytest.mark.slow
def test_ours_starts_ranks_in_the_place_of_ddp(tmp_path: Path) -> None:
    (tests := tmp_path / "checkout/tests/tests_pytorch").mkdir(parents=True)
    (tests / "test_it.py").write_text(OF_RANKS)
    found = run(tmp_path / "checkout", "zero1_custom", ["."], tmp_path / "found.jsonl", start_ranks=True)
    kinds = {test.partition("::test_")[2]: outcome.kind for test, outcome in found.items()}
    assert kinds.pop("further_rank") in FAILED
    assert kinds == {"two[ddp]": "passed", "two[ddp_spawn]": "passed", "two[strategy2]": "passed"}
    assert "only there" in found["test_it.py::test_further_rank"].error


def test_what_is_accepted_and_what_is_not() -> None:
    stock = {"a.py::one[x-1]": Outcome("passed"), "a.py::two": Outcome("passed"), "b.py::three": Outcome("failed")}
    ours = {test: Outcome("failed", "because") for test in stock}
    assert Comparison("fsdp_custom", stock, ours, []).unexplained.keys() == {"a.py::one[x-1]", "a.py::two"}
    some = Comparison("fsdp_custom", stock, ours, [Accepted(["a.py::one[x*"], ["fsdp*"], "it is so")])
    assert some.unexplained.keys() == {"a.py::two"}
    assert "only under fsdp_custom: 2 failed, of which 1 are accepted\n  a.py::two: failed: because" in some.report()
    assert Comparison("ddp_custom", stock, ours, some.accepted).unexplained.keys() == {"a.py::one[x-1]", "a.py::two"}
    better = Comparison("fsdp_custom", stock, {**ours, "a.py::one[x-1]": Outcome("passed")}, some.accepted)
    assert better.obsolete == ["it is so (a.py::one[x*)"]
    other = Comparison("fsdp_custom", stock, {"a.py::two": Outcome("passed")}, some.accepted)
    assert not other.obsolete
    skipped = Comparison("fsdp_custom", stock, {"a.py::one[x-1]": Outcome("skipped")}, some.accepted)
    assert not skipped.obsolete


def test_each_accepted_difference_has_a_reason() -> None:
    suite = Suite.read()
    assert suite.paths
    for each in suite.accepted:
        assert each.tests, each
        assert each.under, each
        assert len(each.reason.split()) > 4, each

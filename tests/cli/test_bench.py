"""The command ``bench``: what it refuses, how it goes on, and a run of it on one rank and two."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_parallel.bench import picture
from lightning_parallel.bench.processes import RAN, REFUSED, Ending
from lightning_parallel.cli import bench as command
from lightning_parallel.cli.bench import bench
from lightning_parallel.errors import ConfigurationError
from lightning_parallel.presets import PRESETS
from tests.bench.made_up import REASON, rank
from tests.cli.command import CONFIG, ROOT

HIDDEN = 16 * 16 + 16
"""Parameters of one layer of `Layered`."""


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "recipe.yaml"
    of_lightning = {"EarlyStopping": {"monitor": "val_loss"}, "LearningRateMonitor": {}, "ModelCheckpoint": {}}
    callbacks = [
        {"class_path": f"lightning.pytorch.callbacks.{name}", "init_args": given}
        for name, given in of_lightning.items()
    ]
    model = {"class_path": "tests.models.cli_module.Layered"}
    path.write_text(
        yaml.safe_dump({**CONFIG, "trainer": {**CONFIG["trainer"], "callbacks": callbacks}, "model": model})
    )
    return str(path)


@pytest.fixture(autouse=True)
def _no_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picture, "can_draw", lambda: False)


class Ranks:
    """In place of processes: made-up results, and an end with Ctrl-C at a given run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cells: list[str] = []
        self.interrupted_at = -1
        monkeypatch.setattr(command, "run_ranks", self.run)

    def run(self, work: Any, arguments: tuple[Any, ...], num_ranks: int, **kwargs: Any) -> Ending:
        cell, _ = arguments
        if len(self.cells) == self.interrupted_at:
            raise KeyboardInterrupt
        self.cells.append(f"{cell.row} {cell.devices}")
        if cell.row == "fsdp_custom" and cell.devices == 2:
            return Ending(REFUSED, REASON)
        return Ending(RAN, ranks=[rank(1.0, 4 * cell.batches) for _ in range(num_ranks)])


@pytest.fixture
def ranks_of(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    return Ranks(monkeypatch)


def arguments(recipe: str, **options: Any) -> list[str]:
    given = {"config": recipe, "strategies": "ddp_custom,fsdp_custom", "devices": "1,2", "scaling": "weak", **options}
    return [f"--{name}={value}" for name, value in given.items()]


# Without ranks ------------------------------------------------------------------------------------------------------


def test_everything_that_is_wrong_is_said_at_once(recipe: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    wrong = arguments(
        recipe, strategies="fsdp_costum,lightning:none", devices="1,two", scaling="up", repeats=0, steps=0,
        timeout=0, output=tmp_path / "file", **{"warm-up": 0},
    )  # fmt: skip
    with pytest.raises(ConfigurationError) as caught:
        bench(wrong)
    assert len(caught.value.violations) == 9
    for words in ("did you mean fsdp_custom", "--devices=1,two", "--scaling=up", "--warm-up=0", "is a file"):
        assert words in str(caught.value)


def test_a_recipe_that_is_none_ends_before_anything_runs(recipe: str, ranks_of: Ranks, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as caught:
        bench([*arguments(recipe), "--trainer.no_such_option=1"])
    assert caught.value.code == 2
    with pytest.raises(ConfigurationError, match="no CUDA device"):
        bench([*arguments(recipe), "--trainer.accelerator=cuda"])
    assert ranks_of.cells == []


def test_help_is_there_at_once() -> None:
    code = (
        "import sys; sys.argv = ['lightning-parallel', 'bench', '--help']\n"
        "from lightning_parallel.cli.main import main; main(); assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    for option in ("--strategies", "--devices", "--scaling", "--warm-up", "--steps", "--repeats", "--output"):
        assert option in done.stdout


def test_an_interrupted_bench_goes_on(
    recipe: str, ranks_of: Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = arguments(recipe, repeats=2, output=tmp_path / "out")
    ranks_of.interrupted_at = 5
    assert bench(line) == 130
    assert "the same command goes on" in capsys.readouterr().err
    assert ranks_of.cells == ["ddp_custom 1", "fsdp_custom 1", "ddp_custom 2", "fsdp_custom 2", "fsdp_custom 1"]
    ranks_of.interrupted_at = -1
    assert bench(line) == 0
    assert ranks_of.cells[5:] == ["ddp_custom 1", "ddp_custom 2"]  # what is refused is not tried again
    shown = capsys.readouterr()
    assert "[1/2] ddp_custom on 1 device, repeat 2 of 2" in shown.err
    assert "refused (1)" in shown.out
    assert REASON in shown.out
    found = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert [cell["repeats"] for cell in found["cells"]] == [2, 2, 2, 0]
    assert found["arguments"] == line
    assert bench(line) == 0
    assert len(ranks_of.cells) == 7


def test_more_rows_and_repeats_join_those_that_are_there(recipe: str, ranks_of: Ranks, tmp_path: Path) -> None:
    output = tmp_path / "out"
    assert bench(arguments(recipe, strategies="ddp_custom", repeats=1, output=output)) == 0
    assert bench(arguments(recipe, strategies="ddp_custom,loop", repeats=2, output=output)) == 0
    assert ranks_of.cells[:2] == ["ddp_custom 1", "ddp_custom 2"]
    assert sorted(ranks_of.cells[2:]) == ["ddp_custom 1", "ddp_custom 2", *["loop 1"] * 2, *["loop 2"] * 2]
    with pytest.raises(ConfigurationError, match=r"steps.timed: 20 before, 10 now"):
        bench(arguments(recipe, steps=10, output=output))
    Path(recipe).write_text(Path(recipe).read_text().replace("max_epochs: 1", "max_epochs: 2"))
    with pytest.raises(ConfigurationError, match=r"recipe.sha256"):
        bench(arguments(recipe, output=output))


def test_nothing_that_ran_is_status_1(recipe: str, ranks_of: Ranks, tmp_path: Path) -> None:
    assert bench(arguments(recipe, strategies="fsdp_custom", devices="2", output=tmp_path / "out")) == 1


def test_what_will_be_missing_is_said_once(
    recipe: str, ranks_of: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "num_cores", lambda: 1)
    assert bench(arguments(recipe, repeats=3, output=tmp_path / "out")) == 0
    shown = capsys.readouterr()
    assert shown.err.count("2 ranks share 1 cores") == 1
    assert shown.err.count("matplotlib is missing, which comes with the extra bench") == 1
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["bench.json"]


def test_the_committed_bench_has_every_name() -> None:
    cells = json.loads((ROOT / "docs" / "benchmarks" / "bench.json").read_text())["cells"]
    outcomes = {(cell["row"], cell["devices"]): cell["outcome"] for cell in cells}
    assert {name: outcomes[name, 1] for name in PRESETS} == dict.fromkeys(PRESETS, "ran")
    assert [name for name in PRESETS if outcomes[name, 2] != "ran"] == ["dp_custom"]
    assert all((ROOT / "docs" / "benchmarks" / "bench.svg").read_text().count(f">{name}<") for name in PRESETS)


# With ranks ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_recipe_is_measured(recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = "ddp_custom,zero1_custom,loop,lightning:ddp,lightning:fsdp,dp_custom"
    line = arguments(recipe, strategies=names, scaling="both", steps=3, repeats=1, output=tmp_path, **{"warm-up": 1})
    # Epochs of several steps: at the ends of epochs, ranks agree on whether to stop.
    assert bench([*line, "--trainer.accumulate_grad_batches=2", "--data.num_samples=128"]) == 0
    shown = capsys.readouterr().out
    found = {
        (c["row"], c["devices"], c["scaling"]): c for c in json.loads((tmp_path / "bench.json").read_text())["cells"]
    }
    for name in ("ddp_custom", "zero1_custom", "loop", "lightning:ddp"):
        samples = [found[name, *cell]["samples"] for cell in ((1, "base"), (2, "weak"), (2, "strong"))]
        assert samples == [8, 16, 8], name  # batches of 4, accumulated twice
        assert found[name, 2, "weak"]["efficiency"] > 0
    width = 5 * 16 + 17 * 16 + 2 * HIDDEN
    for name in ("ddp_custom", "loop", "lightning:ddp"):
        calls, sent = found[name, 2, "weak"]["collectives"]["all-reduce"]
        assert (calls, sent) == (1, 4 * width), name  # of an accumulation window, the last backward reduces
    assert found["loop", 1, "base"]["collectives"] == {}
    assert found["dp_custom", 1, "base"]["outcome"] == "ran"
    assert found["dp_custom", 2, "weak"]["reason"].startswith("the host is one device to dp_custom")
    assert found["lightning:fsdp", 1, "base"]["outcome"] == "ended"
    assert "requires a GPU accelerator" in shown.replace("\n", " ")
    assert "Traceback" in (tmp_path / "logs" / "lightning_fsdp_on_1_device.log").read_text()


@pytest.mark.slow
def test_ranks_that_share_samples_read_the_same_global_batch(tmp_path: Path) -> None:
    line = arguments(str(ROOT / "recipes/byte_lm/config.yaml"), strategies="tp_custom", scaling="both", output=tmp_path)
    assert bench([*line, "--steps=2", "--repeats=1", "--warm-up=1", "--trainer.accelerator=cpu"]) == 0
    _, weak, strong = json.loads((tmp_path / "bench.json").read_text())["cells"]
    assert (weak["samples"], strong["samples"]) == (16, 8)
    assert weak["tokens_per_second"] == pytest.approx(64 * weak["samples_per_second"])
    calls, sent = weak["collectives"]["all-reduce"]
    activation = 4 * 16 * 64 * 128
    assert calls >= 8  # two a layer forward, two backward, in two layers
    assert 8 * activation <= sent < 8.1 * activation

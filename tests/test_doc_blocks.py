"""Code blocks of README and the documentation run, and links between pages lead somewhere."""

from __future__ import annotations

import importlib
import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
import transformers
import yaml
from torch import nn

import lightning_parallel
from lightning_parallel import build_strategy
from lightning_parallel.cli import bench_options
from tests.cli.command import run
from tests.data import loader_of
from tests.models.cases import ByteGPT
from tests.parity import make_trainer

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
ELSEWHERE = {
    "pip": ".ci/run runs README's commands in a fresh environment",
    "torchrun": "it needs two machines; tests/launch starts one node after the other",
    "python": "test_project.py looks for the files and modules that are run; they take their time",
    "jupyter": "test_cookbook.py runs the cells",
    "LIGHTNING_CHECKOUT=CHECKOUT": "it needs a checkout of Lightning",
    "export": "it needs a checkpoint; tests/cli does so",
}
"""First word of a command that is not run here -> why not."""
WITHOUT_COMMANDS = ("CONTRIBUTING.md",)
"""Pages whose commands test_project.py checks."""


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Args:
        page: The page's path from the root.
        line: The line at which it begins.
        language: Behind the fence.
        text: Between the fences.
    """

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(*languages: str) -> list[Block]:
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in re.finditer(r"^```(\w+)\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL):
            if match[1] in languages:
                line = text.count("\n", 0, match.start()) + 1
                found.append(Block(str(page.relative_to(ROOT)), line, match[1], match[2]))
    return found


class Data(L.LightningDataModule):
    """Two batches."""

    def train_dataloader(self) -> Any:
        return loader_of("byte_gpt", steps=2, global_batch=4, num_ranks=1)


class Model(ByteGPT):
    """A module as a reader has one."""

    def __init__(self) -> None:  # without arguments, as LightningCLI would ask for them
        super().__init__()


REAL = L.Trainer


def quiet_trainer(strategy: Any = "auto", devices: int = 1, **kwargs: Any) -> L.Trainer:
    """A trainer as it stands in the page, and one on a single rank in its place where the strategy is only named."""
    with mock.patch.object(L, "Trainer", REAL):
        trainer = make_trainer(strategy, devices, **kwargs)
        if devices > 1 and isinstance(strategy, str):
            kwargs.pop("num_nodes", None)
            trainer = make_trainer(strategy, 1, **kwargs)
    return trainer


def names_of_a_reader() -> dict[str, Any]:
    """What code on a page takes for granted."""
    return {
        "__name__": "__main__",
        "L": L,
        "torch": torch,
        "Trainer": quiet_trainer,
        "MeshStrategy": lightning_parallel.MeshStrategy,
        "MyModule": Model,
        "MyDataModule": Data,
        "GPT": nn.Identity,
        "module": Model(),
        "data": Data(),
        "self": mock.MagicMock(),
        "optimizer": mock.MagicMock(),
        "batch": torch.zeros(2, 4),
        "is_last": True,
    }


@pytest.fixture
def downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory with the folder of weights that pages begin with, of a model that is small."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).save_pretrained(tmp_path / "Llama-3.2-1B")
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("downloads")
@pytest.mark.parametrize("block", blocks("python"), ids=str)
def test_python_runs(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(L, "Trainer", quiet_trainer)
    command = "train.py fit --seed_everything=0 --strategy=fsdp_custom --trainer.devices=1 --trainer.accelerator=cpu"
    quiet = "--trainer.fast_dev_run=1 --trainer.logger=false --trainer.enable_model_summary=false"
    monkeypatch.setattr(sys, "argv", f"{command} {quiet} --trainer.enable_progress_bar=false".split())
    exec(compile(block.text, str(block), "exec"), names_of_a_reader())


@pytest.mark.parametrize("block", blocks("yaml"), ids=str)
def test_yaml_is_taken(block: Block) -> None:
    config = yaml.safe_load(block.text)
    assert set(config) <= {"strategy", "trainer"}
    trainer = dict(config.get("trainer", {}))
    callbacks = [built(each) for each in trainer.pop("callbacks", [])]
    strategy: Any = trainer.pop("strategy", None)
    if strategy is not None:
        strategy = built(strategy)
    elif "strategy" in config:
        strategy = build_strategy(config["strategy"])
    make_trainer(strategy or "auto", trainer.pop("devices", 1), callbacks=callbacks, **trainer)


def built(entry: dict[str, Any]) -> Any:
    """The object of `class_path` and `init_args`."""
    module, _, name = entry["class_path"].rpartition(".")
    make: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return make(**entry.get("init_args", {}))


def commands(*, of: str) -> list[tuple[Block, list[str]]]:
    """Commands of `lightning-parallel` that begin with `of`, and those that nobody has accounted for with ``""``."""
    found = []
    for block in blocks("bash"):
        if block.page.endswith(WITHOUT_COMMANDS):
            continue
        lines = block.text.replace("\\\n", " ").splitlines()
        for words in (shlex.split(part, comments=True) for line in lines for part in line.split("&&")):
            if words and words[0] == "lightning-parallel":
                words = words[1:]
            elif words and words[0] not in ELSEWHERE and of == "":
                found.append((block, words))
            if words and words[0] == of:
                found.append((block, words))
    return found


def test_no_command_is_forgotten() -> None:
    known = {"fit", "launch", "bench", *ELSEWHERE, "pytest", "sphinx-build"}
    assert [words for _, words in commands(of="") if words[0] not in known] == []
    assert len(commands(of="fit")) >= 8


FITS = [each for each in commands(of="fit") if not each[0].page.startswith("docs/cookbook/")]
"""Without those of the cookbook, which test_cookbook.py runs."""


@pytest.mark.parametrize(("block", "words"), FITS, ids=str)
def test_fits_can_be_planned(
    block: Block, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a fit would do on as many ranks, without starting them."""
    monkeypatch.chdir(ROOT)
    assert run(monkeypatch, "explain", *words[1:], "--trainer.accelerator=cpu") == 0
    assert "refused" not in capsys.readouterr().out


@pytest.mark.parametrize(("block", "words"), commands(of="launch"), ids=str)
def test_launches_are_written(block: Block, words: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    place = words.index("--output") + 1
    target = tmp_path / words[place]
    check = ["--check", "none"]  # the recipe is the one of the fits above
    arguments = [*words[1:place], str(target), *check, *words[place + 1 :]]
    assert run(monkeypatch, "launch", *arguments) == 0
    assert target.is_file()


@pytest.mark.parametrize(("block", "words"), commands(of="bench"), ids=str)
def test_benches_can_be_parsed(block: Block, words: list[str]) -> None:
    options, rest = bench_options.build_parser().parse_known_args(words[1:])
    assert options.devices
    assert all(word.startswith("--config") or (ROOT / word).is_file() for word in rest)


REFUSED = {"hsdp_custom:replicate=3,tensor=2,offload=disk"}
"""Options of a page that shows how they are refused."""
LIGHTNINGS = {"ddp"}
"""Names of Lightning's own strategies, which pages compare with."""


def options_in_texts() -> set[str]:
    """What follows `--strategy=` in the pages, also outside of commands that run."""
    found = set()
    for page in PAGES:
        for match in re.findall(r"--strategy=(?:'([^']+)'|\"([^\"]+)\"|([\w:=,.\[\]]+))", page.read_text()):
            found.update(each for each in match if each[:1].islower())
    return found


def test_options_in_texts_are_taken() -> None:
    found = options_in_texts()
    assert len(found) > 25
    for text in found - REFUSED - LIGHTNINGS:
        build_strategy(text)


def test_strategies_in_texts_can_be_built() -> None:
    names = {name: getattr(lightning_parallel, name) for name in lightning_parallel.__all__}
    calls = {call for block in blocks("text") for call in re.findall(r"^MeshStrategy\(.*\)", block.text, re.MULTILINE)}
    assert len(calls) >= 8
    for call in calls:
        assert isinstance(eval(call, dict(names)), lightning_parallel.MeshStrategy), call


# Links --------------------------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and MyST make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {heading.replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"`[^`]*`", "", text)
    missing = []
    for target in re.findall(r"\]\(\s*([^)\s]+)\s*\)", text):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        other = page.parent / path if path else page
        if not other.exists() or (anchor and anchor not in anchors(other)):
            missing.append(target)
    assert missing == []


def test_the_korean_quick_start_is_that_of_the_english_one() -> None:
    """The same code but for comments, the same figures in its table, the same headings."""

    def outline(page: str) -> tuple[list[str], int, list[str]]:
        text = (ROOT / "docs" / page).read_text()
        code = [
            re.sub(r"\s*#.*", "", each.text) for each in blocks("bash", "python", "yaml") if each.page == f"docs/{page}"
        ]
        rows = [re.findall(r"\d+(?:\.\d+)?", line) for line in text.splitlines() if line.startswith("| `")]
        figures = [each for row in rows for each in row[-2:]]
        return code, len(re.findall(r"^#+ ", text, flags=re.MULTILINE)), figures

    english, korean = outline("quick_start.md"), outline("ko/quick_start.md")
    assert korean == english

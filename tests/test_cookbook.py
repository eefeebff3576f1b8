"""Each page of the cookbook runs: its commands on ranks of the CPU, and what it says one sees is what they print."""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from recipes.lora.module import FineTuned, LowRank
from tests.cookbook import FOLDER, HEADINGS, LONG, PAGES, ROOT, check_seen, commands, fenced, num_ranks
from tests.jobs.recipes import run_command, run_counted, run_script
from tests.parity import difference

SHORT = [
    "adamw_8bit",
    "custom_callback",
    "custom_plan",
    "ema",
    "float8",
    "from_ddp",
    "from_deepspeed",
    "gan",
    "moe",
    "offload",
]
"""Pages about which nothing more is said than what one sees."""
TWO_BATCHES = ["--trainer.max_epochs=1", "--trainer.limit_train_batches=2", "--trainer.limit_val_batches=1"]


# Pages --------------------------------------------------------------------------------------------------------------


def test_every_page_answers_the_same_questions() -> None:
    for page in PAGES:
        text = (FOLDER / f"{page}.md").read_text()
        assert re.findall(r"^## (.*)$", text, flags=re.MULTILINE) == HEADINGS, page
        assert text.count("\n") <= 70, page


def test_every_recipe_has_its_page_and_every_page_its_row() -> None:
    recipes = {path.name for path in (ROOT / "recipes").iterdir() if any(path.glob("[!_]*.*"))}
    assert recipes <= set(PAGES)
    rows = re.findall(r"^\|.*\]\((\w+)\.md\).*\|$", (FOLDER / "index.md").read_text(), flags=re.MULTILINE)
    assert sorted(rows) == PAGES


def test_a_line_that_was_not_printed_is_noticed() -> None:
    said = fenced("lora", "What you see", "text")
    check_seen("lora", said)
    with pytest.raises(AssertionError, match="is not in"):
        check_seen("lora", said.replace("first step equals", "first step"))
    with pytest.raises(AssertionError):
        check_seen("lora", re.sub(r"(\d)(\.\d+)", r"9\1\2", said))


# Commands -----------------------------------------------------------------------------------------------------------


def run_page(page: str, ranks: Any, folder: Path, *more: str) -> list[str]:
    """What rank 0 prints in each command of a page."""
    return [ranks(num_ranks(words)).run(run_command, [*words, *more], str(folder))[0] for words in commands(page)]


def first_weights(recipe: str) -> dict[str, torch.Tensor]:
    """The weights with which a recipe begins."""
    config = yaml.safe_load((ROOT / "recipes" / recipe / "config.yaml").read_text())
    L.seed_everything(config["seed_everything"], verbose=False)
    module, _, name = config["model"]["class_path"].rpartition(".")
    return getattr(importlib.import_module(module), name)(**config["model"]["init_args"]).state_dict()


def checkpoint(folder: Path) -> dict[str, Any]:
    """The one checkpoint below a folder."""
    (path,) = folder.rglob("*.ckpt")
    return torch.load(path, weights_only=False)


@pytest.mark.parametrize("page", LONG)
def test_first_step_of_a_long_recipe(page: str, ranks: Any, tmp_path: Path) -> None:
    printed = run_page(page, ranks, tmp_path, *TWO_BATCHES)[0]
    check_seen(page, printed, is_whole=False)


def test_lora(ranks: Any, tmp_path: Path) -> None:
    check_seen("lora", *run_page("lora", ranks, tmp_path))
    before, after = first_weights("lora"), checkpoint(tmp_path)["state_dict"]
    changed = {name for name in after if not torch.equal(before[name], after[name])}
    assert changed == {name for name in after if ".up." in name or ".down." in name}


@pytest.mark.parametrize("page", SHORT)
def test_recipe(page: str, ranks: Any, tmp_path: Path) -> None:
    check_seen(page, "\n".join(run_page(page, ranks, tmp_path)))


def test_lora_of_a_model_in_a_folder(tmp_path: Path) -> None:
    full = FineTuned(rank=0)
    assert all(parameter.requires_grad for parameter in full.parameters())
    full.model.save_pretrained(tmp_path)
    module = FineTuned(str(tmp_path))
    assert not module.model.model.embed_tokens.weight.requires_grad
    assert isinstance(module.model.model.layers[0].self_attn.q_proj, LowRank)
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(module.model(tokens).logits, whole(tokens).logits)


def test_slow_network(ranks: Any, tmp_path: Path) -> None:
    last, every = [ranks(2).run(run_counted, words, str(tmp_path))[0] for words in commands("slow_network")]
    for printed, _ in (last, every):
        check_seen("slow_network", printed)
    assert every[1] == 8 * last[1] > 0


def test_resumed_run_ends_as_one_that_was_never_interrupted(ranks: Any, tmp_path: Path) -> None:
    logs, kept, whole = (tmp_path / name for name in ("lightning_logs", "kept", "whole"))
    first, second = commands("resume")
    printed = ranks(2).run(run_command, first, str(tmp_path))[0]
    shutil.copytree(logs, kept)
    longer = [*first, "--trainer.max_epochs=3"]
    ranks(2).run(run_command, [*longer, "--strategy=zero1_custom", "--ckpt_path=last"], str(tmp_path))
    whole.mkdir()
    ranks(2).run(run_command, longer, str(whole))
    ends = [torch.load(next(folder.rglob("last.ckpt")), weights_only=False) for folder in (logs, whole)]
    assert [end["global_step"] for end in ends] == [60, 60]
    assert difference(*(end["state_dict"] for end in ends)) < 1e-5

    shutil.rmtree(logs)
    kept.rename(logs)
    check_seen("resume", printed + ranks(1).run(run_command, second, str(tmp_path))[0])


def test_script(ranks: Any, tmp_path: Path) -> None:
    _, path, number = shlex.split(fenced("script", "Command", "bash"))
    printed = ranks(int(number)).run(run_script, path, [number], str(tmp_path))[0]
    lines = (ROOT / path).read_text().splitlines()
    assert sum(bool(line.strip()) for line in lines) < 30
    for page in ("script", "from_accelerate"):
        check_seen(page, printed)
        changes = [line for line in fenced(page, "What you see", "diff").splitlines() if line != "..."]
        assert all((line[1:] in lines) != line.startswith("-") for line in changes)


CELLS = """
import json, sys

sys.ps1 = ">>> "
names = {"__name__": "__main__"}
for cell in json.load(open(sys.argv[1]))["cells"]:
    if cell["cell_type"] == "code":
        exec("".join(cell["source"]), names)
"""


@pytest.mark.slow
def test_notebook(tmp_path: Path) -> None:
    words = shlex.split(fenced("notebook", "Command", "bash"))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", CELLS, str(ROOT / words[-1])]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    check_seen("notebook", done.stderr + done.stdout)
    cells = json.loads((ROOT / words[-1]).read_text())["cells"]
    assert [cell["outputs"] for cell in cells if cell["cell_type"] == "code"] == [[], [], [], []]

"""What outsiders meet first: one version, workflows whose commands exist, documents that name real files."""

from __future__ import annotations

import ast
import itertools
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import lightning_parallel

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
MADE_BY_COMMANDS = ("dist/", "docs/_build/", ".venv/")
"""Where commands write; what they name there need not exist before."""
TOOLS = {
    "mypy": "mypy",
    "pytest": "pytest",
    "ruff": "ruff",
    "sphinx-build": "sphinx",
    "pre-commit": "pre-commit",
    "twine": "twine",
}
"""Command -> the distribution that brings it."""
OF_THE_SYSTEM = ("pip", "python", "test", ".")


# The version ------------------------------------------------------------------------------------------------------


def test_the_version_is_in_one_place() -> None:
    assert "version" not in PROJECT["project"]
    assert PROJECT["project"]["dynamic"] == ["version"]
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "lightning_parallel.__version__"}
    tree = ast.parse((ROOT / "lightning_parallel" / "__init__.py").read_text())
    (value,) = (n.value for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "__version__")
    assert ast.literal_eval(value) == lightning_parallel.__version__  # a literal: the build reads it without torch


def test_citation_and_changelog_name_the_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == lightning_parallel.__version__
    assert citation["license"] == PROJECT["project"]["license"]
    assert citation["title"] == PROJECT["project"]["name"]
    assert set(citation) >= {"cff-version", "message", "authors"}  # what its format requires, with the title
    headings = re.findall(r"^## (\S+)", (ROOT / "docs" / "changelog.md").read_text(), flags=re.MULTILINE)
    assert lightning_parallel.__version__ in headings[:2]  # the first may be "Unreleased"


# Commands ---------------------------------------------------------------------------------------------------------


def jobs(path: Path) -> Iterator[tuple[str, dict[str, Any], dict[str, str]]]:
    """Each job of a workflow with each of the values that its matrix gives."""
    for name, job in yaml.safe_load(path.read_text())["jobs"].items():
        for values in job.get("strategy", {}).get("matrix", {}).get("include", [{}]):
            yield f"{path.name}: {name}", job, values


def commands(text: str, values: dict[str, str] | None = None) -> list[list[str]]:
    """The words of each command in `text`, with what a matrix gives put in."""
    for key, value in (values or {}).items():
        text = text.replace(f"${{{{ matrix.{key} }}}}", value)
    lines = (line for line in text.replace("\\\n", " ").splitlines() if line.strip())
    found = [shlex.split(part, comments=True) for line in lines for part in line.split("&&")]
    named = [list(itertools.dropwhile(lambda word: re.match(r"[A-Z_]+=", word), words)) for words in found]
    return [words for words in named if words]


class Installed:
    """What the commands so far have installed, by the names of distributions."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def add(self, words: list[str]) -> None:
        assert words[:2] == ["pip", "install"], words
        arguments = iter(words[2:])
        for argument in arguments:
            if argument == "--constraint":
                assert (ROOT / next(arguments)).is_file(), words
            elif argument.startswith(".["):
                self._add_extra(argument[2:-1])
            elif not argument.startswith("-"):
                self.names.add(argument)

    def _add_extra(self, extra: str) -> None:
        for requirement in PROJECT["project"]["optional-dependencies"][extra]:
            name, extras = re.match(r"([\w-]+)(?:\[([\w,]+)\])?", requirement).groups()  # type: ignore[union-attr]
            self.names.add(name)
            for inner in (extras or "").split(",") if name == PROJECT["project"]["name"] else ():
                self._add_extra(inner)


def check_command(words: list[str], installed: Installed, markers: list[str]) -> None:
    """Fail for a command that an outsider could not run."""
    program = words[0]
    if program == "pip":
        installed.add(words)
    elif program in TOOLS:
        assert TOOLS[program] in installed.names, f"{program} before it is installed: {words}"
    elif program == "python" and words[1] == "-m":
        own = ROOT / words[2].replace(".", "/")
        assert words[2] in installed.names | {"venv"} or own.is_dir() or own.with_suffix(".py").is_file(), words
    else:
        assert program in OF_THE_SYSTEM or (ROOT / program).is_file(), words
    if program == "pytest" and "-m" in words:
        marker = words[words.index("-m") + 1]
        assert any(known.partition(":")[0] == marker for known in markers), f"no marker is called {marker}"
    for word in words[1:]:
        is_path = re.fullmatch(r"[\w.-]+(/[\w.-]+)+/?", word) is not None
        if is_path and not word.startswith(MADE_BY_COMMANDS):
            assert (ROOT / word).exists(), f"{word} of {words} does not exist"


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_run_what_exists(path: Path, pytestconfig: pytest.Config) -> None:
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}  # what a job needs beyond it, the job asks for
    for name, job, values in jobs(path):
        assert job["timeout-minutes"] <= 180, name
        assert set(job.get("needs", "").split()) <= set(workflow["jobs"]), name
        installed = Installed()
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step), (name, step)
            if "uses" in step:
                assert re.fullmatch(r"[\w-]+/[\w-]+@(v\d+|release/v\d+)", step["uses"]), (name, step)
            for words in commands(step.get("run", ""), values):
                check_command(words, installed, pytestconfig.getini("markers"))


def test_workflows_cover_every_constraints_file() -> None:
    files = {file.stem for file in (ROOT / "tests" / "constraints").glob("*.txt")}
    for workflow in ("check.yml", "nightly.yml"):
        path = ROOT / ".github" / "workflows" / workflow
        assert {values["versions"] for _, _, values in jobs(path) if values} == files


def test_workflows_begin_when_they_should() -> None:
    triggers = {path.stem: yaml.safe_load(path.read_text())[True] for path in WORKFLOWS}  # YAML reads `on` as true
    assert set(triggers) == {"check", "nightly", "publish"}
    assert set(triggers["check"]) == {"push", "pull_request"}
    assert set(triggers["nightly"]) == {"schedule", "workflow_dispatch"}
    assert triggers["publish"] == {"push": {"tags": ["v*"]}}


def test_pre_commit_hooks_run_what_exists() -> None:
    development = Installed()
    development.add(["pip", "install", ".[dev]"])
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    hooks = [hook for repository in config["repos"] for hook in repository["hooks"]]
    assert {"ruff-check", "ruff-format", "mypy", "end-of-file-fixer"} <= {hook["id"] for hook in hooks}
    assert all(repository["repo"] == "local" for repository in config["repos"])
    for hook in hooks:
        if hook["language"] == "system":
            assert TOOLS[shlex.split(hook["entry"])[0]] in development.names
        else:
            assert hook["language"] == "python"
            assert hook["additional_dependencies"]


def test_commands_of_the_contributing_page_exist(pytestconfig: pytest.Config) -> None:
    text = (ROOT / "docs" / "CONTRIBUTING.md").read_text()
    blocks = re.findall(r"^```bash\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    table = re.findall(r"^\| (`.*?`(?: and `.*?`)*) \|", text, flags=re.MULTILINE)
    installed = Installed()
    assert blocks
    assert table
    for words in commands("".join(blocks)) + commands("\n".join(re.findall("`(.*?)`", "\n".join(table)))):
        check_command(words, installed, pytestconfig.getini("markers"))


# Documents --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_documents_name_files_that_exist(path: Path) -> None:
    """Paths in backticks or commands, and dotted names of the package's modules."""
    text = path.read_text()
    paths = re.findall(r"(?<![\w/.])((?:lightning_parallel|tests|recipes|docs|\.ci|\.github)/[\w./-]*[\w/])", text)
    missing = [name for name in paths if not name.startswith(MADE_BY_COMMANDS) and not (ROOT / name).exists()]
    assert missing == []
    for name in re.findall(r"\blightning_parallel((?:\.[a-z_]+)+)\.(?:[A-Z]|find_|apply_|build_|plan_)", text):
        module = ROOT / "lightning_parallel" / name[1:].replace(".", "/")
        assert module.is_dir() or module.with_suffix(".py").is_file(), f"{name} is no module"

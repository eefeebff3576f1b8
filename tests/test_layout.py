"""A module imports only modules of layers below its own; techniques never import each other. No exceptions."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parent
MOST_LINES = 400
PACKAGE = TESTS.parent / "lightning_parallel"
LAYERS = (
    ("errors",),
    ("_torch", "_lightning"),
    ("ranks",),
    ("module",),
    ("techniques", "checkpoint"),
    ("dtypes",),
    ("policies",),
    ("plan",),
    ("parallelize",),
    ("step_hooks",),
    ("steps",),
    ("strategies", "callbacks"),
    ("presets",),
    ("verification", "bench", "launch", "report"),
    ("cli",),
    ("",),
)
MODULES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))
WITH_LIGHTNING = ("strategies", "callbacks", "verification", "bench", "cli", "presets", "_lightning")
WITHOUT_ENVIRONMENT = ("techniques", "checkpoint", "parallelize", "ranks")


def name_of(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def layer_of(module: str) -> int:
    top = module.partition(".")[0]
    return next(index for index, names in enumerate(LAYERS) if top in names)


def technique_of(module: str) -> str:
    """One file, or one folder where a technique takes several."""
    return module.split(".")[1] if "." in module else ""


def imports(path: Path) -> list[str]:
    """All imported modules by full name, `from a import b` as ``a.b`` too."""
    found = []
    for node in ast.walk(ast.parse((PACKAGE / path).read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found += [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
    return found


def own_imports(path: Path) -> set[str]:
    """Imported modules of the package, relative to it."""
    names = {str(name_of(p)) for p in MODULES}
    prefix = "lightning_parallel."
    return {i.removeprefix(prefix) for i in imports(path) if i.startswith(prefix)} & names


def test_layers_name_what_exists() -> None:
    named = {name for names in LAYERS for name in names}
    at_root = {path.parts[0].removesuffix(".py").removesuffix("__init__") for path in MODULES}
    assert named == at_root
    assert set(WITH_LIGHTNING) | set(WITHOUT_ENVIRONMENT) <= at_root


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_imports_go_down(path: Path) -> None:
    own = name_of(path)
    for other in own_imports(path):
        same_folder = other.partition(".")[0] == own.partition(".")[0]
        is_sibling_technique = (
            same_folder and own.startswith("techniques.") and technique_of(other) != technique_of(own)
        )
        assert not is_sibling_technique, f"{own} imports its sibling {other}"
        assert layer_of(other) < layer_of(own) or same_folder, f"{own} imports {other}"


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_lightning_is_at_the_edge(path: Path) -> None:
    if path.parts[0].removesuffix(".py") not in WITH_LIGHTNING:
        tree = ast.parse((PACKAGE / path).read_text())
        checking = {
            id(inner)
            for node in ast.walk(tree)
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            for inner in ast.walk(node)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom) and id(node) not in checking:
                module = node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
                assert str(module).partition(".")[0] not in ("lightning", "pytorch_lightning")


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_private_torch_is_in_one_place(path: Path) -> None:
    if path.parts[0] != "_torch":
        private = [i for i in imports(path) if i.startswith("torch.") and "._" in i and "torch.utils._" not in i]
        assert private == []


def attributes(path: Path) -> list[ast.Attribute]:
    return [node for node in ast.walk(ast.parse((PACKAGE / path).read_text())) if isinstance(node, ast.Attribute)]


@cache
def names_not_of_lightning() -> set[str]:
    """Private names of the package and of torch's modules and tensors, without those that _lightning reads."""
    found = set(dir(torch.nn.Module())) | set(dir(torch.Tensor))
    for path in MODULES:
        if path.parts[0] != "_lightning":
            nodes = list(ast.walk(ast.parse((PACKAGE / path).read_text())))
            found |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
            found |= {node.attr for node in attributes(path) if isinstance(node.ctx, ast.Store)}
    return found - {node.attr for path in MODULES if path.parts[0] == "_lightning" for node in attributes(path)}


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_private_lightning_is_in_one_place(path: Path) -> None:
    if path.parts[0] == "_lightning":
        return
    assert [i for i in imports(path) if i.startswith(("lightning.", "torchmetrics.")) and "._" in i] == []
    if path.parts[0].removesuffix(".py") in WITH_LIGHTNING:
        of_others = [node for node in attributes(path) if ast.unparse(node.value) not in ("self", "cls", "super()")]
        private = {node.attr for node in of_others if node.attr.startswith("_") and not node.attr.startswith("__")}
        assert private <= names_not_of_lightning(), "a name of Lightning's belongs in _lightning"


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_techniques_read_no_environment(path: Path) -> None:
    if path.parts[0].removesuffix(".py") in WITHOUT_ENVIRONMENT:
        assert "environ" not in (PACKAGE / path).read_text()


# The tests themselves -------------------------------------------------------------------------------------------------


def test_files_of_tests_are_short() -> None:
    lines = {path: path.read_text().count("\n") for path in TESTS.rglob("*.py")}
    assert {str(path.relative_to(TESTS)): number for path, number in lines.items() if number > MOST_LINES} == {}


def test_files_of_tests_do_not_import_each_other() -> None:
    """What they share is in `models`, `jobs`, `data.py`, `parity.py` and so on, none of which has a test."""
    for path in TESTS.rglob("*.py"):
        parts = [part for module in imports(path) if module.startswith("tests.") for part in module.split(".")]
        assert not any(part.startswith("test_") for part in parts), path
        assert path.name.startswith("test_") or "\ndef test_" not in path.read_text(), path


def test_folders_of_tests_are_those_of_the_package() -> None:
    folders = {path.parent.relative_to(TESTS) for path in TESTS.rglob("test_*.py")}
    of_others = {Path("matrices"), Path("gpu"), Path("lightning_suite"), Path("zoo")}
    assert all((PACKAGE / folder).is_dir() for folder in folders - of_others)

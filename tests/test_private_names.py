"""Every private name of torch, Lightning and torchmetrics that the package uses is there, in this version.

The uses are read from the code: what is imported, what is read from modules and classes, and what is read from objects
whose class `RECEIVERS` names. This file imports neither the package nor other tests before a test runs, so that it can
still speak where a name is gone that is imported: ``pytest --noconftest tests/test_private_names.py``.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import lightning
import pytest
import torch

PACKAGE = Path(__file__).parents[1] / "lightning_parallel"
FILES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))
VERSIONS = f"torch {torch.__version__}, Lightning {lightning.__version__}"
FOREIGN = ("torch", "lightning", "torchmetrics")

FSDP, LOOPS = "torch.distributed.fsdp._fully_shard.", "lightning.pytorch.loops."
CONNECTORS = "lightning.pytorch.trainer.connectors."
STATE, UNIT = f"{FSDP}_fsdp_state.FSDPState", f"{FSDP}_fully_shard.FSDPModule"
RECEIVERS: dict[str, dict[str, str]] = {
    "_torch/unit_calls.py": {"layer": "torch.nn.Module", "state": STATE, "unit": UNIT},
    "_torch/fsdp.py": {
        "context": f"{FSDP}_fsdp_state.FSDPStateContext",
        "group": f"{FSDP}_fsdp_param_group.FSDPParamGroup",
        "holder": "torch.nn.Module",
        "parameter": f"{FSDP}_fsdp_param.FSDPParam",
        "part": f"{FSDP}_fsdp_state.FSDPState",
        "root": f"{FSDP}_fully_shard.FSDPModule",
        "root._get_fsdp_state()": f"{FSDP}_fsdp_state.FSDPState",
        "scaler": "torch.amp.GradScaler",
        "state": f"{FSDP}_fsdp_state.FSDPState",
        "unit": f"{FSDP}_fully_shard.FSDPModule",
        "unit._get_fsdp_state()": f"{FSDP}_fsdp_state.FSDPState",
    },
    "_torch/optimizers.py": {"optimizer": "torch.optim.Adam"},
    "_torch/ddp.py": {"wrapped": "torch.nn.parallel.DistributedDataParallel"},
    "_torch/autograd.py": {"leaf": "torch.Tensor"},
    "_torch/dense_parts.py": {"tensor": "torch.distributed.tensor.DTensor"},
    "_torch/joint_operations.py": {"func": "torch._ops.OpOverload"},
    "_torch/sample_draws.py": {"func": "torch._ops.OpOverload"},
    "_torch/mixed_lists.py": {"operation": "torch._ops.OpOverload", "each": "torch._ops.OpOverload"},
    "_torch/unit_parameters.py": {
        "group": f"{FSDP}_fsdp_param_group.FSDPParamGroup",
        "parameter": f"{FSDP}_fsdp_param.FSDPParam",
        "ran": f"{FSDP}_fsdp_param_group.FSDPCommContext",
        "self._parameter": f"{FSDP}_fsdp_param.FSDPParam",
        "state": f"{FSDP}_fsdp_state.FSDPState",
        "tensor": "torch.distributed.tensor.DTensor",
        "unit": f"{FSDP}_fully_shard.FSDPModule",
    },
    "_torch/unit_classes.py": {
        "state": f"{FSDP}_fsdp_state.FSDPState",
        "unit": f"{FSDP}_fully_shard.FSDPModule",
    },
    "_torch/groups.py": {
        "arg": "torch.ScriptObject",
        "mesh": "torch.distributed.DeviceMesh",
        "options": "torch.distributed.distributed_c10d.ProcessGroupGloo._Options",
    },
    "_torch/attention.py": {
        "options": "torch.distributed.tensor.experimental._context_parallel._attention._cp_options",
    },
    "_torch/host_reads.py": {"tensor": "torch.distributed.tensor.DTensor"},
    "_torch/tensors.py": {"tensor": "torch.distributed.tensor.DTensor"},
    "_torch/part_operations.py": {
        "parts": "torch.distributed.tensor.DTensor",
        "tensor": "torch.distributed.tensor.DTensor",
        "operation": "torch._ops.OpOverload",
    },
    "_torch/whole_operands.py": dict.fromkeys(
        ("base", "result", "target", "tensor"), "torch.distributed.tensor.DTensor"
    ),
    "_torch/written_numbers.py": {
        "tensor": "torch.distributed.tensor.DTensor",
        "tensor._local_tensor.untyped_storage()": "torch.UntypedStorage",
    },
    "_torch/modules.py": {"tensor": "torch.nn.parameter"},  # `nn.Parameter` looks for what is set
    "_lightning/metrics.py": {"metric": "torchmetrics.Metric"},
    "_lightning/__init__.py": {
        "module": "lightning.pytorch.LightningModule",
        "strategy": "lightning.pytorch.strategies.ParallelStrategy",
        "trainer": "lightning.pytorch.Trainer",
        "wrapped": "lightning.pytorch.core.optimizer.LightningOptimizer",
        "trainer._accelerator_connector": f"{CONNECTORS}accelerator_connector._AcceleratorConnector",
        "trainer._logger_connector": f"{CONNECTORS}logger_connector.logger_connector._LoggerConnector",
        "trainer.fit_loop": f"{LOOPS}fit_loop._FitLoop",
        "trainer.fit_loop.epoch_loop": f"{LOOPS}training_epoch_loop._TrainingEpochLoop",
    },
    "_lightning/epochs.py": {
        "fit_loop": f"{LOOPS}fit_loop._FitLoop",
        "combined": "lightning.pytorch.utilities.combined_loader.CombinedLoader",
        "iterator": "lightning.pytorch.utilities.combined_loader._MinSize",
        "loop": f"{LOOPS}training_epoch_loop._TrainingEpochLoop",
        "loop.batch_progress": f"{LOOPS}progress._BatchProgress",
        "sampler.dataset": "lightning.fabric.utilities.distributed._DatasetSamplerWrapper",
        "trainer": "lightning.pytorch.Trainer",
        "trainer.fit_loop": f"{LOOPS}fit_loop._FitLoop",
    },
    "_lightning/logs.py": {"trainer.fit_loop.epoch_loop": f"{LOOPS}training_epoch_loop._TrainingEpochLoop"},
    "_lightning/fetchers.py": {
        "loop": f"{LOOPS}evaluation_loop._EvaluationLoop",
        "loop._combined_loader": "lightning.pytorch.utilities.combined_loader.CombinedLoader",
        "sampler": "lightning.pytorch.overrides.distributed._IndexBatchSamplerWrapper",
        "trainer.fit_loop": f"{LOOPS}fit_loop._FitLoop",
    },
    "_lightning/resuming.py": {
        "connector": f"{CONNECTORS}checkpoint_connector._CheckpointConnector",
        "trainer": "lightning.pytorch.Trainer",
    },
    "_lightning/signals.py": {
        "loop": f"{LOOPS}training_epoch_loop._TrainingEpochLoop",
        "thread": "lightning.fabric.strategies.launchers.subprocess_script._ChildProcessObserver",
        "trainer": "lightning.pytorch.Trainer",
    },
}
"""File -> an expression in it -> whose instance it is. All that is read from it or set on it is looked up there."""


STRINGS = {
    "_torch/attention.py": ("torch.ops.aten",),
    "_torch/autograd.py": ("torch.utils.checkpoint",),
    "_torch/flops.py": ("torch.ops.aten",),
    "_torch/fsdp.py": (f"{FSDP}_fsdp_param.FSDPParam", f"{FSDP}_fsdp_state.FSDPState", "torch.nn.Module"),
    "_torch/loaders.py": ("torch.utils.data.dataloader._BaseDataLoaderIter",),
    "_torch/modules.py": ("torch.nn.Module", "torch._dynamo.eval_frame.OptimizedModule"),
    "_lightning/__init__.py": (
        "lightning.pytorch.utilities.combined_loader.CombinedLoader",
        "lightning.pytorch.loggers.TensorBoardLogger",
        "lightning.pytorch.strategies.Strategy",
        f"{LOOPS}training_epoch_loop._TrainingEpochLoop",
    ),
    "_lightning/signals.py": (f"{LOOPS}training_epoch_loop._TrainingEpochLoop",),
    "strategies/refusals.py": ("torch.Tensor", "torch.nn.Module"),
}
"""File -> where the names are that it has as strings. Tables of operations are of those that there are."""

SCHEDULES = "torch.distributed.pipelining.schedules."
UNWRITTEN = {
    "_torch/schedules.py": [
        *(f"{SCHEDULES}{cls}._get_pipeline_order" for cls in ("ScheduleGPipe", "Schedule1F1B")),
        *(
            f"{SCHEDULES}{cls}._calculate_single_rank_operations"
            for cls in ("ScheduleInterleaved1F1B", "ScheduleZBVZeroBubble", "ScheduleDualPipeV")
        ),
    ],
    "strategies/ddp.py": ["lightning.pytorch.strategies.DDPStrategy._forward_redirection"],
    "strategies/mesh.py": ["lightning.pytorch.strategies.Strategy._precision_plugin"],
    "strategies/process_group.py": ["lightning.pytorch.strategies.Strategy._launcher"],
}
"""File -> names that cannot be read from its code, such as attributes of Lightning's that it sets on itself."""

INSTEAD: dict[str, str | None] = {
    "_broadcast_sigterm_tensor": None,
    "_checkpoint_without_reentrant_generator": "torch.utils.checkpoint._checkpoint_without_reentrant_generator_impl",
    "_checkpoint_without_reentrant_generator_impl": "torch.utils.checkpoint._checkpoint_without_reentrant_generator",
    "_fsdp_param_group": f"{FSDP}_fsdp_state.FSDPState._fsdp_param_groups",
    "_fsdp_param_groups": f"{FSDP}_fsdp_state.FSDPState._fsdp_param_group",
    "_set_pg_timeout": "torch.distributed.set_timeout",
    "set_reduce_scatter_unused_params": None,
    "unsharded_accumulated_grad": f"{FSDP}_fsdp_param.FSDPParam.unsharded_grad_dtype",
    "unsharded_grad_dtype": f"{FSDP}_fsdp_param.FSDPParam.unsharded_accumulated_grad",
}
"""Name -> what the package takes in versions without it; ``None`` where it does without."""


class Use(NamedTuple):
    """One place in the code that needs a name.

    Args:
        line: Where it stands in its file.
        owner: Whose it is, with dots; "" if that is not known.
        name: The name, as it is read.
        is_set: Whether it is set there, and not only read.
    """

    line: int
    owner: str
    name: str
    is_set: bool = False


@functools.cache
def nodes_of(file: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse((PACKAGE / file).read_text())))


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def is_foreign(path: str) -> bool:
    return path.partition(".")[0] in FOREIGN


def is_edge(file: str) -> bool:
    """Whether this file is there to touch what is private elsewhere."""
    return file.startswith("_")


# What the code uses -------------------------------------------------------------------------------------------------


def imported(file: str) -> tuple[dict[str, str], list[Use]]:
    """What names of the file stand for, with dots; and the imports of what is private."""
    aliases, uses = {}, []
    for node in nodes_of(file):
        if isinstance(node, ast.Import):
            for each in node.names:
                aliases[each.asname or each.name.partition(".")[0]] = (
                    each.name if each.asname else each.name.split(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and is_foreign(str(node.module)):
            for each in node.names:
                aliases[each.asname or each.name] = f"{node.module}.{each.name}"
                if any(map(is_private, f"{node.module}.{each.name}".split("."))):
                    uses.append(Use(node.lineno, str(node.module), each.name))
    for node in nodes_of(file):  # `of_torch: Any = dist.distributed_c10d.ProcessGroupGloo`
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(target, ast.Name) and node.value is not None:
            chain = dotted(node.value, aliases)
            if chain is not None:
                aliases.setdefault(target.id, chain)
    return {name: to for name, to in aliases.items() if is_foreign(to)}, uses


def dotted(node: ast.AST, aliases: dict[str, str]) -> str | None:
    """``dist._broadcast_coalesced`` in full; nothing for what is no name of a module or a class."""
    if isinstance(node, ast.Name):
        return aliases.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value, aliases)
        return owner and f"{owner}.{node.attr}"
    return None


def uses_of(file: str) -> list[Use]:
    aliases, uses = imported(file)
    receivers = RECEIVERS.get(file, {})
    for node in nodes_of(file):
        if isinstance(node, ast.Attribute):
            is_set = not isinstance(node.ctx, ast.Load)
            owner = receivers.get(ast.unparse(node.value)) or dotted(node.value, aliases)
            is_own = ast.unparse(node.value) in ("self", "cls", "super()")
            if owner is not None and (is_edge(file) or is_private(node.attr)):
                uses.append(Use(node.lineno, owner, node.attr, is_set))
            elif owner is None and is_private(node.attr) and not is_own and node.attr not in own_names():
                uses.append(Use(node.lineno, "", node.attr, is_set))
        elif isinstance(node, ast.Constant) and file in STRINGS and re.fullmatch(r"_[a-z]\w+", str(node.value)):
            owner = next((each for each in STRINGS[file] if has(found(each), node.value)), STRINGS[file][0])
            uses.append(Use(node.lineno, owner, node.value))
    return uses + [Use(0, *each.rsplit(".", 1)) for each in UNWRITTEN.get(file, ())]


@functools.cache
def own_names() -> frozenset[str]:
    """What the package itself calls its functions, classes and attributes."""
    every = [node for file in FILES if not is_edge(file) for node in nodes_of(file)]
    defined = {node.name for node in every if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    return frozenset(defined | {n.attr for n in every if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)})


# What there is ------------------------------------------------------------------------------------------------------


@functools.cache
def found(path: str) -> Any:
    """The module, class or object at a path with dots; ``None`` if there is none."""
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        for name in parts[length:]:
            value = getattr(value, name, None)
        return value
    return None


def has(owner: Any, name: str) -> bool:
    return owner is not None and (hasattr(owner, name) or name in assigned(owner))


@functools.cache
def assigned(owner: Any) -> frozenset[str]:
    """What methods of a class set on its objects, and what it annotates; of a module: what it sets on any object."""
    names: set[str] = set()
    for each in getattr(owner, "__mro__", (owner,)):
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(each)))
        except (OSError, TypeError):  # written in C++
            continue
        except SyntaxError:  # of torch.Tensor, Python 3.13 reads some lines of the module that exports it
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.attr)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names.add(node.target.id)
    return frozenset(names)


@functools.cache
def anything_of_torch() -> tuple[Any, ...]:
    """Objects of the kinds that modules, layers and tensors of users are."""
    tensor = torch.ones(1)
    return torch.nn.MultiheadAttention(2, 1), tensor, tensor.untyped_storage(), torch.ops.aten.mm.default


def missing(file: str, use: Use) -> str:
    """A sentence that says what is not there, "" if it is."""
    place = f"lightning_parallel/{file}" + (f":{use.line}" if use.line else "")
    if not use.owner:
        if not is_edge(file) and any(hasattr(each, use.name) for each in anything_of_torch()):
            return ""
        return f"{VERSIONS}: whose {use.name} does {place} use? Say it in RECEIVERS, or it is gone"
    if has(found(use.owner), use.name):
        if not use.is_set or not is_read_only(found(use.owner), use.name):
            return ""
        problem = f"{use.name} of {use.owner} can only be read, and {place} sets it"
    else:
        problem = f"{use.owner} has no {use.name}, which {place} uses"
    other = INSTEAD.get(use.name, "")
    is_pardoned = other is None or (other and has(*_split(other)))
    return "" if is_pardoned else f"{VERSIONS}: {problem}"


def _split(path: str) -> tuple[Any, str]:
    owner, _, name = path.rpartition(".")
    return found(owner), name


def is_read_only(owner: Any, name: str) -> bool:
    value = inspect.getattr_static(owner, name, None)
    return isinstance(value, property) and value.fset is None


# The tests ----------------------------------------------------------------------------------------------------------


def check(sentences: Iterable[str]) -> None:
    if problems := dict.fromkeys(each for each in sentences if each):
        pytest.fail("\n".join(problems), pytrace=False)


@pytest.mark.parametrize("file", FILES)
def test_names_are_there(file: str) -> None:
    check(missing(file, use) for use in uses_of(file))


def test_tables_name_what_is_used() -> None:
    for file, expressions in RECEIVERS.items():
        written = {ast.unparse(node.value) for node in nodes_of(file) if isinstance(node, ast.Attribute)}
        assert set(expressions) <= written, file
    every = {node.value for file in FILES for node in nodes_of(file) if isinstance(node, ast.Constant)}
    every |= {node.attr for file in FILES for node in nodes_of(file) if isinstance(node, ast.Attribute)}
    assert set(INSTEAD) <= every


def classes_of(file: str) -> Iterator[tuple[ast.ClassDef, type]]:
    """Classes of a file that inherit from others' ones."""
    trees = [node for node in ast.parse((PACKAGE / file).read_text()).body if isinstance(node, ast.ClassDef)]
    if trees:
        name = "lightning_parallel." + file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        module = importlib.import_module(name)
        for tree in trees:
            cls = getattr(module, tree.name)
            if any(is_foreign(base.__module__) for base in cls.__mro__):
                yield tree, cls


def inherited(tree: ast.ClassDef, cls: type) -> Iterator[Use]:
    """Private names that a class reads from itself or overrides, and that none of the package's classes defines."""
    bases = [base for base in cls.__mro__ if is_foreign(base.__module__)]
    owner = f"{bases[0].__module__}.{bases[0].__qualname__}"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and is_private(node.name):
            if any(ast.unparse(decorator) == "override" for decorator in node.decorator_list):
                yield Use(node.lineno, owner, node.name)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "super()"):
            is_own = any(has(each, node.attr) for each in cls.__mro__ if each not in bases and each is not object)
            if is_private(node.attr) and isinstance(node.ctx, ast.Load) and not is_own:
                yield Use(node.lineno, owner, node.attr)


@pytest.mark.parametrize("file", [file for file in FILES if not is_edge(file)])
def test_inherited_names_are_there(file: str) -> None:
    check(missing(file, use) for tree, cls in classes_of(file) for use in inherited(tree, cls))

"""Objects of user's classes and generators of random numbers that modules hold: a trial changes them, too."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_parallel.module.object_state import (
    CONTAINERS,
    DEEPEST,
    MOST_ENTRIES,
    Numbers,
    ObjectState,
    tensors_inside,
)

FRAMEWORKS = ("lightning", "lightning_parallel", "pytorch_lightning", "torch", "torchmetrics", "transformers")
_OTHERS = ("aim", "clearml", "comet_ml", "mlflow", "neptune", "numpy", "rich", "tensorboard", "tqdm", "wandb")
"""Libraries whose objects keep no state for a step; loggers' threads write into theirs meanwhile."""
_NO_STATE = (nn.Module, Tensor, type, FunctionType, MethodType, ModuleType)
_TABLES = frozenset(vars(nn.Module())) - {"training"}
"""Attributes of all modules: parameters, children, hooks."""
_MOST = 1 << 16
"""Entries of a container, or elements of a tensor, that are state of a step; more of them are data."""


class HeldObjects:
    """The state of objects among the attributes of modules, to be put back.

    A running mean in a class of the user's is one, a generator of numpy's another. Attributes of the modules are looked
    at, entries of containers among them, and attributes of such objects in turn. Classes that are derived from a
    framework's, such as datasets, and what is too large for the state of a step, are left alone.

    Args:
        modules: The modules.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        held = {id(value): value for module in modules for _, value in _held("", module)}
        self._states = [ObjectState(value, _is_small) for value in held.values() if has_state(value)]
        self._generators = [generator for value in held.values() if (generator := _generator(value)) is not None]
        self._before = [(put_back, state()) for state, put_back in self._generators]
        values = (value for each in self._states for value in each.attributes.before.values())
        self._numbers = Numbers(t for t in dict.fromkeys(tensors_inside(values)) if not t.is_meta)

    def restore(self) -> None:
        """Put everything back, as often as needed."""
        for state in self._states:
            state.restore()
        self._numbers.restore()
        for put_back, before in self._before:
            put_back(before)

    @property
    def has_drawn(self) -> bool:
        """Whether a generator is in another state than before."""
        now = [state() for state, _ in self._generators]
        return any(_comparable(a) != _comparable(b) for a, (_, b) in zip(now, self._before, strict=True))


def stateful_objects(modules: Mapping[str, nn.Module]) -> dict[str, Any]:
    """Objects of the user's classes that modules hold, by path; one that is held twice, by its first.

    Args:
        modules: Path -> module.

    Example:
        >>> stateful_objects({"": module})
        {"meters['loss']": <AverageMeter>}
    """
    found = [pair for path, module in modules.items() for pair in _held(path, module) if has_state(pair[1])]
    first = {id(value): path for path, value in reversed(found)}
    return {path: value for path, value in found if first[id(value)] == path}


def _held(path: str, holder: Any, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Attributes of `holder`, entries of containers there, and attributes of the user's objects there, by path."""
    for name, value in vars(holder).items():
        if not (isinstance(holder, nn.Module) and name in _TABLES):
            yield from _entries(f"{path}.{name}" if path else name, value, depth)


def _entries(path: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    yield path, value
    if depth == DEEPEST:
        return
    if type(value) in (*CONTAINERS, tuple):
        if len(value) <= MOST_ENTRIES:
            pairs = value.items() if isinstance(value, dict) else enumerate(value)
            for key, each in pairs:
                yield from _entries(f"{path}[{key!r}]", each, depth + 1)
    elif has_state(value):
        yield from _held(path, value, depth + 1)


def has_state(value: Any) -> bool:
    """Whether it is an object of a class of the user's, which may keep something from step to step."""
    if isinstance(value, _NO_STATE) or not hasattr(value, "__dict__"):
        return False
    libraries = {
        cls.__module__.partition(".")[0] for cls in type(value).__mro__ if cls not in (object, SimpleNamespace)
    }
    return libraries.isdisjoint((*FRAMEWORKS, *_OTHERS)) and libraries.isdisjoint(sys.stdlib_module_names)


def _is_small(_: str, value: Any) -> bool:
    size = value.numel() if isinstance(value, Tensor) else len(value) if type(value) in CONTAINERS else 0
    return size <= _MOST


def _generator(value: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]] | None:
    """Functions that read and write the state of a generator of random numbers; ``None`` for anything else."""
    if isinstance(value, np.random.Generator):
        bits = value.bit_generator
        return lambda: bits.state, lambda state: setattr(bits, "state", state)
    if isinstance(value, np.random.RandomState):
        return value.get_state, value.set_state
    if isinstance(value, random.Random):
        return value.getstate, value.setstate
    if isinstance(value, torch.Generator):
        return value.get_state, value.set_state
    return None


def _comparable(state: Any) -> bytes:
    return pickle.dumps(state.tolist() if isinstance(state, Tensor) else state)

"""Dataclasses among what layers are given and return, taken apart so that their tensors pass like others."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import register_pytree_node, tree_leaves, tree_map

from lightning_parallel.errors import ConfigurationError
from lightning_parallel.module.kv_cache import is_cache

_classes: dict[str, type[Any]] = {}
"""Classes of records that this process has met; those in functions are not found by name."""


@dataclass
class _Apart:
    """The class of a record by name, and its fields."""

    name: str
    values: dict[str, Any]


register_pytree_node(
    _Apart,
    lambda apart: (list(apart.values.values()), (apart.name, list(apart.values))),
    lambda values, context: _Apart(context[0], dict(zip(context[1], values, strict=True))),
)


def taken_apart(values: Any) -> Any:
    """The same containers, where each dataclass is one, too.

    Args:
        values: Nested containers of what a layer is given or returns.
    """
    if not any(map(_is_record, tree_leaves(values, is_leaf=is_cache))):
        return values
    return tree_map(_apart, values, is_leaf=is_cache)


def put_together(values: Any) -> Any:
    """The containers and dataclasses that `taken_apart` was given, of the values that are there now; on any rank.

    Raises:
        ConfigurationError: If this rank does not find the class of a record.
    """
    if not any(isinstance(leaf, _Apart) for leaf in tree_leaves(values, is_leaf=_is_apart_or_cache)):
        return values
    return tree_map(_together, values, is_leaf=_is_apart_or_cache)


def _is_record(leaf: Any) -> bool:
    return is_dataclass(leaf) and not isinstance(leaf, type | nn.Module | Tensor | _Apart)


def _is_apart_or_cache(leaf: Any) -> bool:
    return isinstance(leaf, _Apart) or is_cache(leaf)


def _apart(leaf: Any) -> Any:
    if not _is_record(leaf):
        return leaf
    cls = type(leaf)
    name = f"{cls.__module__}:{cls.__qualname__}"
    _classes[name] = cls
    names = dict.fromkeys([*(field.name for field in fields(leaf)), *getattr(leaf, "__dict__", ())])
    return _Apart(name, {each: taken_apart(getattr(leaf, each)) for each in names if hasattr(leaf, each)})


def _together(leaf: Any) -> Any:
    if not isinstance(leaf, _Apart):
        return leaf
    record = object.__new__(_class_of(leaf.name))
    for name, value in leaf.values.items():
        object.__setattr__(record, name, put_together(value))  # also of frozen ones; nothing is computed anew
    return record


def _class_of(name: str) -> type[Any]:
    if name not in _classes:
        module, _, path = name.partition(":")
        try:
            found: Any = importlib.import_module(module)
            for part in path.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError) as error:
            raise ConfigurationError([_UNKNOWN.format(path, module)]) from error
        _classes[name] = found
    return _classes[name]


_UNKNOWN = (
    "a layer of another pipeline stage returns {0}, a class that this rank does not find in {1}; define it at the top "
    "level of its file, let layers return tensors, or give pipeline=1"
)

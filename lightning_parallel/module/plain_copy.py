"""A plain copy of a module, taken before it is made parallel and filled when it is needed."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_parallel.module.object_state import CONTAINERS, MOST_ENTRIES
from lightning_parallel.module.placeholders import is_placeholder
from lightning_parallel.ranks.dtensors import local_of

_VALUES = (bool, int, float, str, type(None))
_PLAIN = (*_VALUES, *CONTAINERS)
_REBOUND = (FunctionType, MethodType, partial, tuple, list, dict)
"""Kinds of objects that lead from a function to those of the module."""


class NotCopyableError(Exception):
    """A module of which no plain copy can be made; the message says why."""


class PlainCopy:
    """The structure of a module, to be filled later with what the module holds then.

    Until then the copy has the module's objects, hooks and tied weights, and no memory for parameters and buffers.

    Args:
        module: The module, before anything is applied to it.
        shared: Objects that the copy refers to as the module does.
        device: Where the copy is going to hold its tensors.

    Raises:
        NotCopyableError: If something in the module cannot be copied.

    Example:
        >>> twin = PlainCopy(module, shared=[trainer], device=device)
        >>> ...  # make the module parallel
        >>> twin.note(module)
        >>> ...  # hooks of the user change attributes
        >>> twin.follow(module)
        >>> twin.fill(module, whole).training_step(batch, 0)
    """

    def __init__(self, module: nn.Module, *, shared: Iterable[object], device: torch.device) -> None:
        self._device = device
        memo: dict[int, Any] = {id(each): each for each in shared}
        for tensor in (*module.parameters(), *module.buffers()):
            memo[id(tensor)] = _without_memory(tensor, device)
        for tensor in _computed_attributes(module):
            memo[id(tensor)] = tensor.detach().to(device, copy=True)
        # deepcopy keeps what it has copied alive in the memo, under this key.
        memo[id(memo)] = []
        try:
            self._copy: nn.Module = copy.deepcopy(module, memo)
        except Exception as error:
            raise NotCopyableError(f"it cannot be copied: {type(error).__name__}: {error}") from error
        rebound: dict[int, tuple[Any, Any]] = {}
        for child in self._copy.modules():
            _rebind_functions(child, memo, rebound)
        self._noted: dict[str, dict[str, Any]] = {}
        self._norms: dict[str, float] = {}

    @property
    def module(self) -> nn.Module:
        """The copy, as it is now."""
        return self._copy

    def note(self, module: nn.Module) -> None:
        """Note the attributes of `module`, once it is parallel and behind a step: from here on, hooks change them."""
        self._noted = {path: dict(_plain_attributes(child)) for path, child in module.named_modules()}

    def note_values(self, module: nn.Module) -> None:
        """Note the values of tensors, so that `changed` can tell which of them hooks write."""
        self._norms = _norms(module)

    def changed(self, module: nn.Module) -> list[str]:
        """Names of parameters and buffers that have other values on this rank than `note_values` has seen."""
        return [name for name, norm in _norms(module).items() if norm != self._norms.get(name)]

    def follow(self, module: nn.Module, *, numbers_only: bool = False) -> None:
        """Give the copy the attributes that `module` has now, and train the same parameters. No collective.

        Args:
            module: The module, parallel by now.
            numbers_only: Whether containers with anything but numbers and names in them are left as they are: by now,
                they may hold the outputs of many steps.

        Raises:
            NotCopyableError: If the module has other submodules or tensors by now.
        """
        self._follow_attributes(module, numbers_only=numbers_only)
        theirs, own = _tensors(module), _tensors(self._copy)
        if theirs.keys() != own.keys():
            names = sorted(theirs.keys() ^ own.keys())
            raise NotCopyableError(f"hooks have given it other tensors since it was set up: {', '.join(names[:4])}")
        for path, child in module.named_modules():
            self._copy.get_submodule(path).training = child.training
        for name, target in own.items():
            if target.requires_grad != theirs[name].requires_grad:
                target.requires_grad_(theirs[name].requires_grad)

    @torch.no_grad()
    def fill(
        self, module: nn.Module, whole: Callable[[str, Tensor], Tensor], names: Collection[str] | None = None
    ) -> nn.Module:
        """Give the copy the numbers that `module` has now. A collective where these are sharded.

        Args:
            module: The module, which the copy follows.
            whole: From the name of a parameter or buffer, and what the module holds, to the whole tensor.
            names: Those to be filled, the same on all ranks; ``None`` for all.

        Raises:
            Exception: The first error in making a tensor, such as of a full memory, after the last collective.
        """
        theirs, filled = _tensors(module), set()
        failed: Exception | None = None
        for name, target in _tensors(self._copy).items():
            if id(target) in filled or (names is not None and name not in names):
                continue
            filled.add(id(target))
            value = whole(name, theirs[name]).detach()
            try:
                target.data = value.to(self._device, copy=True)
            except Exception as error:  # the other ranks still wait for this one's shards
                failed = failed or error
            target.requires_grad_(theirs[name].requires_grad)
        if failed is not None:
            raise failed
        return self._copy

    def empty(self) -> None:
        """Free what the copy was filled with; it follows all attributes of the module when it is needed again."""
        self._noted = {}
        for tensor in _tensors(self._copy).values():
            tensor.grad = None
            tensor.data = tensor.data.new_empty(0)

    def held_bytes(self) -> int:
        """Bytes of the tensors that the copy has in attributes, and in containers there."""
        values = (vars(child).values() for child in self._copy.modules())
        tensors = {id(t): t for each in values for value in each for t in _leaves(value) if isinstance(t, Tensor)}
        return sum(t.numel() * t.element_size() for t in tensors.values())

    def _follow_attributes(self, module: nn.Module, *, numbers_only: bool) -> None:
        twins: dict[int, Any] = {}
        for path, child in module.named_modules():
            twin = _submodule(self._copy, path)
            if twin is None:
                raise NotCopyableError(f"hooks have added {path!r} to it since it was set up")
            twins[id(child)] = twin
        for path, child in module.named_modules():
            noted = self._noted.get(path, {})
            for name, value in _plain_attributes(child):
                if numbers_only and any(type(leaf) not in _VALUES for leaf in _leaves(value)):
                    continue
                if name not in noted or _differs(noted[name], value):
                    try:
                        vars(twins[id(child)])[name] = copy.deepcopy(value, dict(twins))
                    except Exception as error:
                        raise NotCopyableError(f"its attribute {name!r} cannot be copied: {error}") from error


def _rebind_functions(child: nn.Module, copies: Mapping[int, Any], rebound: dict[int, tuple[Any, Any]]) -> None:
    """Let functions on a copied module, its hooks among them, refer to copies where they refer to what was copied.

    `copy.deepcopy` copies methods together with their object, but takes functions for constants: a hook that fills a
    list on ``self`` would fill that of the module.
    """
    for name, value in vars(child).items():
        if isinstance(value, FunctionType):
            vars(child)[name] = _rebound(value, copies, rebound)
        elif isinstance(value, dict):
            functions = {key: each for key, each in value.items() if isinstance(each, FunctionType)}
            for key, function in functions.items():
                twin = _rebound(function, copies, rebound)
                dict.__setitem__(value, key, twin)  # also where its own methods refuse changes


def _rebound(held: Any, copies: Mapping[int, Any], rebound: dict[int, tuple[Any, Any]]) -> Any:
    """An object that a function holds, or itself, where that leads to copied objects: to their copies instead.

    Args:
        held: A function, a method, a container, or anything else.
        copies: Number of an object by `id` -> its copy.
        rebound: The same -> what was held, and what is in its place; filled.
    """
    if id(held) in copies:
        return copies[id(held)]
    if id(held) in rebound:
        return rebound[id(held)][1]
    if not isinstance(held, _REBOUND) or not _leads_to(held, copies):
        return held
    again = partial(_rebound, copies=copies, rebound=rebound)
    twin: Any
    if isinstance(held, MethodType):
        return MethodType(again(held.__func__), again(held.__self__))  # a new object each time that it is read
    if isinstance(held, FunctionType):
        cells = tuple(CellType() for _ in held.__closure__ or ())
        twin = FunctionType(held.__code__, held.__globals__, held.__name__, None, cells)
        rebound[id(held)] = held, twin  # before what it holds, which may be itself
        for cell, own in zip(held.__closure__ or (), cells, strict=True):
            with contextlib.suppress(ValueError):  # a variable that has no value yet
                own.cell_contents = again(cell.cell_contents)
        twin.__defaults__ = held.__defaults__ and tuple(map(again, held.__defaults__))
        twin.__kwdefaults__ = held.__kwdefaults__ and {name: again(each) for name, each in held.__kwdefaults__.items()}
        twin.__dict__.update(vars(held))
        return twin
    if isinstance(held, partial):
        twin = partial(again(held.func), *map(again, held.args), **{k: again(v) for k, v in held.keywords.items()})
    elif isinstance(held, tuple):
        twin = tuple(map(again, held))
    elif isinstance(held, list):
        rebound[id(held)] = held, (twin := [])
        twin.extend(map(again, held))
    else:
        rebound[id(held)] = held, (twin := {})
        twin.update((key, again(each)) for key, each in held.items())
    rebound[id(held)] = held, twin
    return twin


def _leads_to(held: Any, copies: Mapping[int, Any]) -> bool:
    """Whether functions, methods and containers lead from an object to one that was copied."""
    seen, waiting = {id(held): held}, [held]
    while waiting:
        for each in _held_by(waiting.pop()):
            if id(each) in copies:
                return True
            if isinstance(each, _REBOUND) and id(each) not in seen:
                seen[id(each)] = each
                waiting.append(each)
    return False


def _held_by(held: Any) -> Iterator[Any]:
    if isinstance(held, MethodType):
        yield from (held.__func__, held.__self__)
    elif isinstance(held, FunctionType):
        for cell in held.__closure__ or ():
            with contextlib.suppress(ValueError):
                yield cell.cell_contents
        yield from held.__defaults__ or ()
        yield from (held.__kwdefaults__ or {}).values()
    elif isinstance(held, partial):
        yield from (held.func, *held.args, *held.keywords.values())
    elif type(held) in (tuple, list, dict) and len(held) <= MOST_ENTRIES:  # what has more is data
        yield from held.values() if isinstance(held, dict) else held


def _plain_attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Attributes that a hook may set: numbers, names, and containers of them, copied so that changes show."""
    for name, value in vars(module).items():
        if name in ("training", "_parameters", "_buffers", "_modules") or type(value) not in _PLAIN:
            continue
        if any(isinstance(leaf, nn.Parameter | DTensor) or is_placeholder(leaf) for leaf in _leaves(value)):
            continue  # such as an LSTM's list of its weights, of which the copy has its own, or averages of shards
        yield name, copy.copy(value) if type(value) in CONTAINERS else value


def _differs(first: Any, second: Any) -> bool:
    """Whether two attributes are different; tensors and objects in containers are, unless they are the same ones."""
    pairs = list(zip(_leaves(first), _leaves(second), strict=False))
    if type(first) is not type(second) or len(pairs) != len(_leaves(first)) or len(pairs) != len(_leaves(second)):
        return True
    return any(a is not b and not (type(a) is type(b) and type(a) in _VALUES and a == b) for a, b in pairs)


def _leaves(value: Any) -> list[Any]:
    """The keys and entries of nested containers, in order; of sets, in any."""
    if isinstance(value, dict):
        return [leaf for item in value.items() for each in item for leaf in _leaves(each)]
    return [leaf for each in value for leaf in _leaves(each)] if isinstance(value, list | tuple | set) else [value]


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Name -> parameter or buffer, under every name that it has."""
    return dict([*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)])


@torch.no_grad()
def _norms(module: nn.Module) -> dict[str, float]:
    """Name -> the norm of what this rank has of a parameter or buffer, as it was rounded."""
    held = {name: local_of(each) for name, each in _tensors(module).items() if not is_placeholder(each)}
    numbers = {
        name: each if each.is_floating_point() or each.is_complex() else each.double() for name, each in held.items()
    }
    norms = {name: torch.linalg.vector_norm(each) for name, each in numbers.items() if not each.is_meta}
    return {name: float(norm) for name, norm in norms.items()}


def _submodule(module: nn.Module, path: str) -> nn.Module | None:
    try:
        return module.get_submodule(path)
    except AttributeError:
        return None


def _computed_attributes(module: nn.Module) -> Iterator[Tensor]:
    """Tensors that a step or a hook has computed from parameters, as torch's pruning does: deepcopy refuses them."""
    for child in module.modules():
        yield from (value for value in vars(child).values() if isinstance(value, Tensor) and not value.is_leaf)


def _without_memory(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the same kind whose memory comes when it is filled."""
    empty = torch.empty((0,), dtype=tensor.dtype, device=device)
    if not isinstance(tensor, nn.Parameter):
        return empty
    parameter = nn.Parameter(empty, requires_grad=tensor.requires_grad)
    parameter.__dict__.update(vars(tensor))  # marks that code reads, such as `parameter.no_weight_decay`
    return parameter

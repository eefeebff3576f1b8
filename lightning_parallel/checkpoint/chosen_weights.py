"""The weights of a checkpoint that leave it: under which names, averaged or not, in which dtype; one at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_parallel.checkpoint.opened import TensorEntry, entries_of
from lightning_parallel.errors import ConfigurationError, check

_MOST_NAMES = 4


class ChosenWeights(Mapping[str, Tensor]):
    """Tensors of a checkpoint by their new names, made when they are asked for.

    Args:
        weights: The mapping under ``"state_dict"``.
        prefix: Only names that begin with this are taken, without it.
        averages: Name -> what takes the place of a tensor, and of those that are tied to it; in the tensor's dtype,
            unless `dtype` is given.
        dtype: That of floating tensors; ``None`` to leave each as it is.

    Raises:
        ConfigurationError: If no name begins with `prefix`, or an average belongs to no tensor.

    Example:
        >>> ChosenWeights(checkpoint["state_dict"], prefix="model.", dtype=torch.bfloat16)["head.weight"]
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        *,
        prefix: str = "",
        averages: Mapping[str, Tensor] | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._weights, self._dtype, self.prefix = weights, dtype, prefix
        entries = entries_of(weights)
        self._average_of = _averages_by_name(entries, averages or {})
        self.entries: dict[str, TensorEntry] = {}
        """New name -> its tensor as it will be; ties are those among the chosen names."""
        first: dict[str, str] = {}
        for entry in entries:
            if entry.name.startswith(prefix) and (name := entry.name.removeprefix(prefix)):
                tied_to = first.setdefault(entry.tied_to or entry.name, name)
                chosen = self._dtype_of(entry)
                is_held = entry.is_held and chosen == entry.dtype and entry.name not in self._average_of
                self.entries[name] = TensorEntry(name, entry.shape, chosen, "" if tied_to == name else tied_to, is_held)
        if not self.entries:
            held = _names(weights) or "no tensors"
            check([f"the prefix {prefix!r} begins no name of a tensor; there are {held}: give one of their beginnings"])

    def __getitem__(self, name: str) -> Tensor:
        entry, source = self.entries[name], self.prefix + name
        average = self._average_of.get(source)
        return _converted(self._weights[source] if average is None else average, entry, source)

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def others(self) -> dict[str, Any]:
        """New name -> what is no tensor: extra state of modules."""
        names = (name.removeprefix(self.prefix) for name in self._weights if name.startswith(self.prefix))
        return {name: self._weights[self.prefix + name] for name in names if name not in self.entries}

    @property
    def left_out(self) -> list[str]:
        """Names that do not begin with the prefix."""
        return [name for name in self._weights if not name.startswith(self.prefix)]

    @property
    def module_versions(self) -> dict[str, Any] | None:
        """Path of a module -> its version, as in a ``state_dict``'s `_metadata`; ``None`` if there are none."""
        versions = getattr(self._weights, "_metadata", None)
        if versions is None or not self.prefix:
            return versions
        root = self.prefix.removesuffix(".")
        below = (path for path in versions if f"{path}.".startswith(self.prefix))
        return {path.removeprefix(root).removeprefix("."): versions[path] for path in below}

    def _dtype_of(self, entry: TensorEntry) -> torch.dtype:
        return self._dtype if self._dtype is not None and entry.dtype.is_floating_point else entry.dtype


def averages_in(checkpoint: Mapping[str, Any]) -> Mapping[str, Tensor]:
    """The averages that :class:`~lightning_parallel.callbacks.ExponentialMovingAverage` has saved, by parameter.

    Args:
        checkpoint: An open checkpoint.

    Raises:
        ConfigurationError: If there are none, or those of several callbacks.
    """
    callbacks = checkpoint.get("callbacks") or {}
    found = {key: state["average"] for key, state in callbacks.items() if _is_average(state)}
    if len(found) > 1:
        check([f"--average: {', '.join(found)} have averages, and whose is not to be seen; leave --average out"])
    average: Mapping[str, Tensor] = next(iter(found.values()), {})
    if not average:
        held = f"its callbacks are {', '.join(callbacks)}" if callbacks else "it has no states of callbacks"
        check(
            [
                f"--average: the checkpoint has no averages of ExponentialMovingAverage, or none yet; {held}. Give one "
                "that was saved after an update with this callback, or leave --average out"
            ]
        )
    return average


def _is_average(state: Any) -> bool:
    """Whether it is the state of that callback, whose class may be derived and have another name."""
    return isinstance(state, Mapping) and "steps" in state and isinstance(state.get("average"), Mapping)


def _averages_by_name(entries: Iterable[TensorEntry], averages: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each name that has an average, and each that is tied to one -> the average."""
    found = {entry.name: entry for entry in entries}
    of_first, violations = {}, []
    for name, average in averages.items():
        entry = found.get(name)
        if entry is None:
            violations.append(f"--average: {name} has an average, and the state_dict lacks it; leave --average out")
        elif entry.shape != tuple(average.shape):
            violations.append(
                f"--average: {name} has the shape {entry.shape}, and its average {tuple(average.shape)}; leave "
                "--average out"
            )
        else:
            of_first[entry.tied_to or name] = average
    check(violations)
    return {
        name: of_first[entry.tied_to or name] for name, entry in found.items() if (entry.tied_to or name) in of_first
    }


def _converted(tensor: Tensor, entry: TensorEntry, source: str) -> Tensor:
    if tensor.dtype == entry.dtype:
        return tensor
    converted = tensor.to(entry.dtype)
    if _has_infinite(converted) and converted.isinf().sum() != tensor.isinf().sum():
        largest = tensor[tensor.isfinite()].abs().max().item()
        raise ConfigurationError(
            [
                f"{source} has values up to {largest:.3g}, and the largest of {entry.dtype} is "
                f"{torch.finfo(entry.dtype).max:.3g}; give --dtype=float32, or leave it out"
            ]
        )
    return converted


def _has_infinite(tensor: Tensor) -> bool:
    """Whether a value is infinite, or may be beside one that is not a number; takes one pass and no memory."""
    return tensor.numel() > 0 and not all(map(math.isfinite, map(float, tensor.aminmax())))


def _names(weights: Iterable[str]) -> str:
    names = list(weights)
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return f"{', '.join(names[:_MOST_NAMES])}{more}"

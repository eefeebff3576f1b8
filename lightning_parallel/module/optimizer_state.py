"""The state of an optimizer of which this rank keeps a part: what user code reads of the rest is refused in words."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_parallel.errors import ConfigurationError, is_asked_by_user, line_of_user
from lightning_parallel.ranks.host_reads import at

_OF_TORCH = "torch."
"""``state_dict()`` of torch asks for whoever has called it."""


class StateOfRank:
    """Refuses what user code reads of an optimizer's state that other ranks keep, until `detach`.

    What optimizers, strategies and checkpoints read of it is this rank's part, as before, and so is what user code
    reads of a parameter whose state is here.

    Args:
        optimizer: The user's.
        is_elsewhere: Whether only other ranks keep the state of a parameter.
        where: Where they do, for messages, such as ``"under zero1_custom"``.

    Example:
        >>> guard = StateOfRank(optimizer, is_placeholder, where="under a pipeline")
        >>> optimizer.state_dict()  # in a hook: ConfigurationError
    """

    def __init__(self, optimizer: Optimizer, is_elsewhere: Callable[[Tensor], bool], *, where: str) -> None:
        self.is_elsewhere = is_elsewhere
        self._optimizer, self._where = optimizer, where
        self._handles: list[RemovableHandle] = [
            optimizer.register_state_dict_pre_hook(lambda _: self.check_whole("state_dict()", _OF_TORCH)),
            # Both replace the state by another one: loading, and whatever has set it to a new one since the last step.
            optimizer.register_load_state_dict_post_hook(lambda _: self._guard()),
            optimizer.register_step_post_hook(lambda *_: self._guard()),
        ]
        self._guard()

    def detach(self) -> None:
        """Let `optimizer` have its own kind of state again, whole or not."""
        for handle in self._handles:
            handle.remove()
        if isinstance(self._optimizer.state, _Guarded):
            self._optimizer.state = self._optimizer.state.plain()

    def check_whole(self, read: str, *within: str) -> None:
        """Refuse to read the states of all parameters, if user code does so and some of them are elsewhere.

        Args:
            read: What is read, for the message.
            within: Beginnings of names of modules whose calls belong to the read.
        """
        if not is_asked_by_user(__name__, *within):
            return
        parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        num_elsewhere = sum(map(self.is_elsewhere, parameters))
        if num_elsewhere:
            num_here = len(parameters) - num_elsewhere
            self._refuse(read, f"this rank keeps that of {num_here} of {len(parameters)} parameters")

    def check_here(self, read: str, parameter: Tensor) -> None:
        """Refuse to read a state of a parameter, if user code does so; it is elsewhere.

        Args:
            read: What is read, for the message.
            parameter: The parameter.
        """
        if is_asked_by_user(__name__):
            names = getattr(parameter, "sources", None)
            name = ", ".join(sorted(names)) if names else f"the parameter of shape {tuple(parameter.shape)}"
            self._refuse(read, f"another rank keeps that of {name}")

    def _refuse(self, read: str, which: str) -> NoReturn:
        raise ConfigurationError(
            [
                f"{read} {at(line_of_user())} reads the state of {type(self._optimizer).__name__}, but {self._where} "
                f"{which}. Called on all ranks, trainer.strategy.optimizer_state(optimizer) gives rank 0 the whole "
                "state_dict(), and trainer.save_checkpoint(path) saves it; ddp_custom keeps it whole on each rank"
            ]
        )

    def _guard(self) -> None:
        if not isinstance(self._optimizer.state, _Guarded) or self._optimizer.state.owner is not self:
            self._optimizer.state = _Guarded(self, self._optimizer.state)


class _Guarded(defaultdict[Tensor, Any]):
    """The state by parameter; what is here is read as fast as from any dict."""

    def __init__(self, owner: StateOfRank, entries: Any) -> None:
        super().__init__(dict, entries.plain() if isinstance(entries, _Guarded) else entries)
        self.owner = owner

    def plain(self) -> defaultdict[Tensor, Any]:
        """The entries that are here, unguarded."""
        return defaultdict(dict, super().items())

    def __missing__(self, key: Tensor) -> Any:
        if isinstance(key, Tensor) and self.owner.is_elsewhere(key) and is_asked_by_user():
            return _Elsewhere(self, key)
        return super().__missing__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        return super().__getitem__(key) if key in self else default

    def __contains__(self, key: object) -> bool:
        is_here = super().__contains__(key)
        if not is_here and isinstance(key, Tensor) and self.owner.is_elsewhere(key):
            self.owner.check_here("asking whether optimizer.state has a parameter", key)
        return is_here

    def __iter__(self) -> Iterator[Tensor]:
        self.owner.check_whole("iter(optimizer.state)")
        return super().__iter__()

    def __len__(self) -> int:
        self.owner.check_whole("len(optimizer.state)")
        return super().__len__()

    def keys(self) -> Any:
        self.owner.check_whole("state.keys()")
        return super().keys()

    def values(self) -> Any:
        self.owner.check_whole("state.values()")
        return super().values()

    def items(self) -> Any:
        self.owner.check_whole("state.items()")
        return super().items()

    def copy(self) -> defaultdict[Tensor, Any]:  # type: ignore[override]
        self.owner.check_whole("state.copy()")
        return self.plain()

    def __copy__(self) -> Any:
        return self.copy()

    def __or__(self, other: Any) -> Any:
        return self.copy() | other

    def __reduce__(self) -> Any:
        self.owner.check_whole("copying or pickling optimizer.state")
        return defaultdict, (dict, dict(super().items()))

    def __repr__(self) -> str:
        return f"<the states of {super().__len__()} parameters; those of others are on other ranks>"


class _Elsewhere(dict[str, Any]):
    """The entries of a parameter whose state is elsewhere: they can be written, as SAM does between two steps."""

    def __init__(self, state: _Guarded, parameter: Tensor) -> None:
        super().__init__()
        self._state, self._parameter = state, parameter

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        self._state.setdefault(self._parameter, {})[name] = value

    def __missing__(self, name: str) -> NoReturn:
        self._check(f"state[parameter][{name!r}]")
        raise KeyError(name)

    def get(self, name: str, default: Any = None) -> Any:
        return super().get(name) if name in self else default

    def __contains__(self, name: object) -> bool:
        is_here = super().__contains__(name)
        if not is_here:
            self._check(f"{name!r} in state[parameter]")
        return is_here

    def __iter__(self) -> Iterator[str]:
        self._check("iter(state[parameter])")
        return super().__iter__()

    def __len__(self) -> int:
        self._check("len(state[parameter])")
        return super().__len__()

    def keys(self) -> Any:
        self._check("state[parameter].keys()")
        return super().keys()

    def values(self) -> Any:
        self._check("state[parameter].values()")
        return super().values()

    def items(self) -> Any:
        self._check("state[parameter].items()")
        return super().items()

    def _check(self, read: str) -> None:
        self._state.owner.check_here(read, self._parameter)

"""Record of a module's construction on the meta device, replayed with the numbers of an eager build.

Every operation that would have filled a new tensor is recorded, and run later, in the same order and from the same
state of the random number generator. A tensor is put into the module, sharded where its parameter is, and freed as soon
as its last operation is done, so that little more than one whole tensor is real at a time. The idea is that of
torchdistX's deferred initialisation.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_parallel import _torch
from lightning_parallel.techniques.deferred_init.replay import Memory, Operation, Window, put, replay

_META = torch.device("meta")
_IS_META, _DEVICE = Tensor.is_meta.__get__, Tensor.device.__get__  # type: ignore[attr-defined]
_OVERWRITING = {"uniform_", "normal_", "zero_", "fill_", "copy_", "random_", "exponential_", "log_normal_"}
_READING = {"_local_scalar_dense", "_to_copy", "equal", "is_nonzero"}


class NotRecordableError(Exception):
    """Refusal of a construction that cannot be replayed later with the same numbers."""


class InitRecord:
    """Operations by which the tensors of a module were made on the meta device.

    Attributes:
        accelerators: Devices that the construction named; what it made there is recorded as made on the host.

    Example:
        >>> record = InitRecord()
        >>> with record:
        ...     module = nn.Linear(4, 4)
        >>> record.finish(module)
        >>> record.materialize(module, torch.device("cpu"))
    """

    def __init__(self) -> None:
        self._operations: list[Operation] = []
        self._storages: dict[int, Any] = {}  # kept alive, so that no address is used for a second storage
        self._made: list[weakref.ref[Tensor]] = []
        self._rng_state = torch.get_rng_state()
        self._names: dict[str, Window] = {}
        self.accelerators: set[str] = set()
        self._modes = contextlib.ExitStack()

    def __enter__(self) -> InitRecord:
        self._modes.enter_context(_torch.modules.initializer_replaced(self._as_one_operation))
        self._modes.enter_context(HostInsteadOfMeta())
        self._modes.enter_context(_Recorder(self))
        return self

    def __exit__(self, *exception: Any) -> None:
        self._modes.close()

    def finish(self, module: nn.Module) -> None:
        """Note the names of the recorded tensors in `module`; call it when the construction has ended.

        Raises:
            NotRecordableError: If a tensor is kept where no name leads to it, or the seed was set meanwhile.
        """
        self._check_random_state()
        self._names = {name: self.window(t) for name, t in _named_tensors(module) if t.is_meta and self.knows(t)}
        kept = {window.storage for window in self._names.values()}
        for made in self._made:
            if (tensor := made()) is not None and self.window(tensor).storage not in kept:
                raise NotRecordableError("a tensor is kept outside parameters, buffers and attributes")

    @torch.no_grad()
    def materialize(self, module: nn.Module, device: torch.device, *, shards_on: torch.device | None = None) -> None:
        """Make all recorded tensors of `module`, sharded or not, with the numbers of an eager build. A collective.

        Args:
            module: The module that was recorded; its parameters may have become DTensors.
            device: The device of whole tensors.
            shards_on: The device of shards; `device` if not given.
        """
        names: dict[int, list[str]] = defaultdict(list)
        for name, window in self._names.items():
            names[window.storage].append(name)
        made: dict[Tensor, nn.Parameter] = {}

        def deliver(storage: int, memory: Memory) -> None:
            for name in names.get(storage, ()):
                put(module, name, memory.view(self._names[name]), device, shards_on or device, made)

        after = torch.get_rng_state()
        start, is_same = self._agreed_start(device)
        torch.set_rng_state(start)
        replay(self._operations, wanted=names, deliver=deliver)
        # An eager build would have left the generator where the replay left it. That is kept only where this rank
        # started from the common state and has drawn nothing since the recording.
        if not is_same or not torch.equal(after, self._rng_state):
            torch.set_rng_state(after)

    def knows(self, tensor: Tensor) -> bool:
        """Whether `tensor` was made while recording."""
        return tensor.untyped_storage()._cdata in self._storages

    def window(self, tensor: Tensor) -> Window:
        """Describe a tensor on the meta device as a window onto its storage."""
        storage = tensor.untyped_storage()
        self._storages.setdefault(storage._cdata, storage)
        return Window(
            storage._cdata, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()), len(storage)
        )

    def note(self, function: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        """Record one operation; views and empty tensors need none.

        Args:
            function: The operation, of `torch.ops.aten`.
            args: Its arguments.
            kwargs: Those by name.
            result: Its result on the meta device.
        """
        is_random = torch.Tag.nondeterministic_seeded in function.tags
        if is_random:
            self._check_random_state(args, kwargs)
        outputs = tuple(self.window(leaf) for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        self._made += [weakref.ref(leaf) for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        args, kwargs = tree_map_only(Tensor, self._as_window, (args, kwargs))
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Window)]
        written = self._written(function, args, kwargs, outputs, {window.storage for window in inputs})
        if not written or function.overloadpacket.__name__ in ("empty", "empty_like", "empty_strided", "new_empty"):
            return
        overwritten = self._overwritten(function, args, inputs)
        reads = frozenset(window.storage for window in inputs) - ({overwritten} if overwritten is not None else set())
        if "dtype" in {a.name for a in function._schema.arguments} and outputs:
            kwargs = {**kwargs, "dtype": outputs[0].dtype}  # the default dtype may have changed before the replay
        if "device" in kwargs:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        self._operations.append(
            Operation(function, args, kwargs, outputs, reads, frozenset(written), overwritten, is_random)
        )

    def _as_one_operation(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Wrap `function`, which fills its first argument with random numbers, so that it is recorded as a whole."""

        def note(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            with _torch.modes.without_function_modes():
                if not tensor.is_meta:
                    raise NotRecordableError("construction fills a tensor that came from outside with random numbers")
                self._check_random_state(args, kwargs)
                window = self.window(tensor)
                written = frozenset({window.storage})
                overwritten = window.storage if window.is_whole else None
                self._operations.append(
                    Operation(function, (window, *args), kwargs, (), frozenset(), written, overwritten, is_random=True)
                )
            return tensor

        return note

    def evaluate(self, tensor: Tensor) -> Tensor:
        """Compute the value of a recorded tensor now, for construction that depends on it.

        Raises:
            NotRecordableError: If the value is random: drawing now and again in the replay would give two values.
        """
        needed, chosen = {self.window(tensor).storage}, []
        for operation in reversed(self._operations):
            if operation.writes & needed:
                if operation.is_random:
                    raise NotRecordableError("construction depends on a random value")
                chosen.append(operation)
                needed |= operation.reads
        memory = Memory()
        for operation in reversed(chosen):
            memory.run(operation)
        return memory.view(self.window(tensor))

    def _as_window(self, tensor: Tensor) -> Any:
        return self.window(tensor) if tensor.is_meta else tensor.detach().to("cpu", copy=True)

    def _check_random_state(self, *given: Any) -> None:
        has_generator = any(isinstance(leaf, torch.Generator) for leaf in tree_leaves(given))
        if has_generator or not torch.equal(torch.get_rng_state(), self._rng_state):
            raise NotRecordableError("construction sets the seed, or draws random numbers in a way of its own")

    @staticmethod
    def _written(
        function: Any, args: Any, kwargs: dict[str, Any], outputs: Sequence[Window], inputs: set[int]
    ) -> set[int]:
        written = {window.storage for window in outputs} - inputs
        for index, argument in enumerate(function._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[index] if index < len(args) else kwargs.get(argument.name)
                written |= {leaf.storage for leaf in tree_leaves(value) if isinstance(leaf, Window)}
        return written

    @staticmethod
    def _overwritten(function: Any, args: Any, inputs: Sequence[Window]) -> int | None:
        """Find the storage, if any, that this operation overwrites completely, so that its former content is dead."""
        if function.overloadpacket.__name__ not in _OVERWRITING or not isinstance(args[0], Window):
            return None
        others = [window for window in inputs if window is not args[0] and window.storage == args[0].storage]
        return args[0].storage if args[0].is_whole and not others else None

    def _agreed_start(self, device: torch.device) -> tuple[Tensor, bool]:
        """Broadcast rank 0's random state, and its copies of tensors that came from outside. A collective.

        Returns:
            The state of rank 0, and whether this rank's own is the same.
        """
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return self._rng_state, True
        given = [leaf for o in self._operations for leaf in tree_leaves((o.args, o.kwargs)) if isinstance(leaf, Tensor)]
        tensors = [self._rng_state.clone(), *given]
        travelling = [tensor.to(device) for tensor in tensors]
        _torch.groups.broadcast_tensors(travelling, source=0)
        for tensor, value in zip(tensors, travelling, strict=True):
            tensor.copy_(value)
        return tensors[0], torch.equal(tensors[0], self._rng_state)


class _Recorder(TorchDispatchMode):
    """Mode in which new host tensors go to the meta device, and operations on them are recorded."""

    def __init__(self, record: InitRecord) -> None:
        super().__init__()
        self._record = record

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with _torch.modes.without_function_modes():
            return self._dispatch(func, args, dict(kwargs or {}))

    def _dispatch(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        has_meta = any(tensor.is_meta for tensor in tensors)
        self._stay_on_host(kwargs)
        name = func.overloadpacket.__name__
        if has_meta and name in _READING and not _stays_on_meta(name, kwargs):
            return func(*tree_map_only(Tensor, self._value, args), **kwargs)
        is_factory = not tensors and any(argument.name == "device" for argument in func._schema.arguments)
        if is_factory:
            kwargs["device"] = _META
        elif not has_meta:
            if torch.Tag.nondeterministic_seeded in func.tags:
                raise NotRecordableError("construction fills a tensor that came from outside with random numbers")
            return func(*args, **kwargs)
        result = func(*tree_map_only(Tensor, _to_meta, args), **tree_map_only(Tensor, _to_meta, kwargs))
        self._check_written(func, args)
        self._record.note(func, args, kwargs, result)
        return result

    def _stay_on_host(self, kwargs: dict[str, Any]) -> None:
        """Make or copy on the host what names an accelerator: only shards go there, after the replay."""
        device = torch.device(kwargs.get("device") or "cpu")
        if device.type not in ("cpu", "meta"):
            self._record.accelerators.add(str(device))
            del kwargs["device"]

    def _value(self, tensor: Tensor) -> Tensor:
        return self._record.evaluate(tensor) if tensor.is_meta else tensor

    @staticmethod
    def _check_written(func: Any, args: Any) -> None:
        for argument, value in zip(func._schema.arguments, args, strict=False):
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            if is_written and isinstance(value, Tensor) and not value.is_meta:
                raise NotRecordableError("construction writes a recorded value into a tensor that came from outside")


class HostInsteadOfMeta(TorchFunctionMode):
    """Mode in which code sees the host in place of the meta device, and so builds as it would eagerly.

    Libraries skip their initialisation where they see the meta device (torch itself in `trunc_normal_` and
    `orthogonal_`, transformers since 5.0), and nothing would be recorded.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "meta":
            kwargs["device"] = torch.device("cpu")
        if func == _IS_META:
            return False
        result = func(*args, **kwargs)
        return torch.device("cpu") if func == _DEVICE and result.type == "meta" else result


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Tensors with their names: parameters, buffers and plain attributes, under all names of each."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)
    for path, submodule in module.named_modules(remove_duplicate=False):
        for name, value in vars(submodule).items():
            if isinstance(value, Tensor):
                yield f"{path}.{name}" if path else name, value


def _stays_on_meta(name: str, kwargs: Mapping[str, Any]) -> bool:
    return name == "_to_copy" and (kwargs.get("device") is None or torch.device(kwargs["device"]).type == "meta")


def _to_meta(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_meta else torch.empty_like(tensor, device=_META)

"""DistributedDataParallel: private or version-dependent names of torch."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Iterator, Sequence

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel, distributed

_LEFT_OUT = "_ddp_params_and_buffers_to_ignore"
_INDICES = re.compile(r"did not receive grad for rank \d+: ((?:\d+ ?)+)")


def unreduced_indices(wrapped: DistributedDataParallel) -> list[int] | None:
    """Numbers of the parameters for which the last backward leaves DDP waiting; ``None`` if it waits for none.

    DDP says so by itself only when the next forward begins. `DistributedDataParallel._check_reducer_finalized`, since
    2.2; no public spelling. Without any numbers in its words the list is empty.
    """
    try:
        wrapped._check_reducer_finalized()
    except RuntimeError as error:
        found = _INDICES.search(str(error))
        return [int(index) for index in found[1].split()] if found else []
    return None


@contextlib.contextmanager
def left_out(module: nn.Module, names: Collection[str]) -> Iterator[None]:
    """Let DDP neither compare nor broadcast the named parameters and buffers of `module` when it is made inside.

    `_ddp_params_and_buffers_to_ignore`, since 1.7; the function of torch that sets it has an underscore, too.

    Args:
        module: The module that DDP is going to wrap; the attribute is as before behind this context.
        names: As `named_parameters` and `named_buffers` have them.
    """
    if not names:
        yield
        return
    before = dict(vars(module))
    vars(module)[_LEFT_OUT] = [*getattr(module, _LEFT_OUT, ()), *names]
    try:
        yield
    finally:
        del vars(module)[_LEFT_OUT]
        if _LEFT_OUT in before:
            vars(module)[_LEFT_OUT] = before[_LEFT_OUT]


def names_left_out(module: nn.Module) -> set[str]:
    """Names of parameters and buffers that the user has told DDP to leave out, by the attribute of `left_out`."""
    return set(getattr(module, _LEFT_OUT, ()))


def send_buffers(wrapped: DistributedDataParallel, send: Callable[[Sequence[Tensor]], None]) -> None:
    """Let `send` give all ranks the buffers of the first one before each forward, those that were left out, too.

    DDP itself cannot send elements that share memory, sparse tensors, or numbers of eight bits.
    `DistributedDataParallel._register_buffer_comm_hook` and `_assign_modules_buffers`, since 1.12; no public spelling.
    By itself, such a hook would be called behind each forward.

    Args:
        wrapped: The wrapped module.
        send: Takes buffers, outside of a graph. A collective.
    """
    before = distributed._BufferCommHookLocation.PRE_FORWARD
    wrapped._register_buffer_comm_hook(None, lambda _, buffers: send(list(buffers.values())), before)
    wrapped.parameters_to_ignore = names_left_out(wrapped.module)
    wrapped._assign_modules_buffers()

"""Points at which losses of a pipeline are tried, and what is otherwise in a trial than in a step."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from lightning_parallel import _torch
from lightning_parallel.techniques.pipeline.joined import Passed
from lightning_parallel.techniques.pipeline.microbatches import IGNORED


class Tried(TorchFunctionMode):
    """Dropout does nothing: its masks on the whole batch are other ones than on microbatches. Labels are noted.

    Args:
        ignored: Takes the labels that losses leave out.
    """

    def __init__(self, ignored: set[int]) -> None:
        super().__init__()
        self._ignored = ignored

    @_torch.modes.part_of_graphs_only
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.dropout:
            return args[0] if args else kwargs["input"]
        if func in (F.cross_entropy, F.nll_loss):
            self._ignored.add(kwargs.get("ignore_index", args[4] if len(args) > 4 else IGNORED))
        return func(*args, **kwargs)


def moved(passed: Passed) -> Passed:
    """Return other hidden states, at least as far from these as these from zero, and from those of any other samples.

    A router that has hardly learned gives all samples nearly the same: a loss of how even its choices are is then the
    mean of its microbatches but for rounding, while its gradient is another one. So all that is moved here moves by
    something of its own, too, which no mean over samples takes away.

    Args:
        passed: What a stage has sent on, `[batch, length, width]`.
    """
    return tree_map_only(Tensor, _moved_tensor, passed)  # type: ignore[no-any-return]


def _moved_tensor(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point() or not tensor.ndim:
        return tensor
    far = tensor.float().pow(2).mean().sqrt().clamp(min=1.0).to(tensor.dtype)
    own = torch.randn(tensor.shape[-1:], dtype=tensor.dtype, device=tensor.device)
    point = tensor + far * (torch.randn_like(tensor) + own)
    return point.abs() if bool((tensor >= 0).all()) else point  # such as probabilities, of which a logarithm is taken


def tolerance_of(passed: list[Passed]) -> float:
    """The largest relative difference by rounding: products of other sizes add up in other orders.

    Args:
        passed: What the last layer has returned for each microbatch.
    """
    hidden = passed[0][0]
    if hidden.dtype in (torch.bfloat16, torch.float16) or torch.is_autocast_enabled(hidden.device.type):
        return 2e-3
    return 1e-5 if hidden.device.type == "cpu" else 1e-4

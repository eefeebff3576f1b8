"""What a rank did in a fit: evidence that a policy was applied, where equal numbers would say nothing.

A step that recomputes, compiles or offloads computes the same as one that does not.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_parallel import _torch
from lightning_parallel.ranks.dtensors import local_of
from lightning_parallel.techniques.sharding import is_sharded
from tests.models.cases import Attention

LOOKED_AT = 2
"""The batch that is looked at: in the first, layers are compared, and a window's end may choose for the next ones."""


class Watch(Callback):
    """Counts, on one rank, what happens in one training batch.

    Args:
        subject: ``"forwards"``, ``"graphs"``, ``"host"`` or ``"gradients"``.
    """

    def __init__(self, subject: str) -> None:
        self.found: Counter[str] = Counter()
        self._subject = subject
        self._batch = contextlib.ExitStack()
        self._fit = contextlib.ExitStack()
        self._is_looking = False

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if self._subject == "host":
            self._fit.enter_context(_copies_to_host(self.found))

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._is_looking = batch_idx == LOOKED_AT
        if self._is_looking and self._subject == "forwards":
            self._batch.enter_context(_forwards(self.found))
            self._batch.enter_context(_AttentionKernels(self.found))
        if self._is_looking and self._subject == "graphs":
            self._batch.enter_context(_graphs(self.found))
        if self._is_looking and self._subject == "gradients":
            self._batch.enter_context(self._behind_backward(trainer, pl_module))

    def _behind_backward(self, trainer: Any, pl_module: Any) -> Any:
        """Where the hook `on_after_backward` is; having that would say that gradients are to be seen there."""
        post_backward = trainer.strategy.post_backward

        def looking(loss: Any) -> None:
            self.found.update(_gradients(pl_module))
            post_backward(loss)

        return mock.patch.object(trainer.strategy, "post_backward", looking)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self._batch.close()
        if self._is_looking:
            self.found["units"] += is_sharded(pl_module)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        for optimizer in trainer.optimizers if self._subject == "host" else ():
            states = [value for entries in dict.values(optimizer.state) for value in entries.values()]
            self.found["state"] += sum(local_of(value).nbytes for value in states if value.ndim)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._batch.close()
        self._fit.close()


def is_in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


@contextlib.contextmanager
def _forwards(found: Counter[str]) -> Iterator[None]:
    """Forwards of each layer's attention, first ones and repeated ones, and what the linear maps compute in."""

    def note(module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(module, Attention):
            found["repeated" if is_in_backward() else "forwards"] += 1
            found[f"parameters in {module.out.weight.dtype}"] += 1
        if isinstance(module, nn.Linear):
            found[f"products in {output.dtype}"] += 1
            # Torchao's Float8Linear has one, and so has the product of a map that is split.
            holders = [module, *getattr(module.forward, "args", ())]
            for config in filter(None, (getattr(each, "config", None) for each in holders)):
                found[f"float8 {config.cast_config_weight.scaling_granularity.value}"] += 1

    handle = nn.modules.module.register_module_forward_hook(note)
    try:
        yield
    finally:
        handle.remove()


class _AttentionKernels(TorchDispatchMode):
    """Counts kernels of attention that run again in backward."""

    def __init__(self, found: Counter[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if "scaled_dot_product" in name and "backward" not in name and is_in_backward():
            self._found["attentions repeated"] += 1
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _graphs(found: Counter[str]) -> Iterator[None]:
    """Compiled functions in the graphs through which backward runs."""
    backward = torch.autograd.backward

    def noted(tensors: Any, *args: Any, **kwargs: Any) -> None:
        waiting = [t.grad_fn for t in ([tensors] if isinstance(tensors, Tensor) else tensors)]
        seen = set()
        while waiting:
            node = waiting.pop()
            if node is not None and node not in seen:
                seen.add(node)
                found["compiled"] += "CompiledFunction" in node.name()
                waiting += [following for following, _ in node.next_functions]
        backward(tensors, *args, **kwargs)

    with mock.patch("torch.autograd.backward", noted):
        yield


@contextlib.contextmanager
def _copies_to_host(found: Counter[str]) -> Iterator[None]:
    """Bytes that the host takes for optimizer state, and those that come from there: here, other memory of the host."""

    def memory(value: Tensor) -> Tensor:
        local = local_of(value)
        found["on host"] += local.nbytes
        own = torch.full_like(local, torch.nan)
        return _torch.tensors.with_local(value, own) if isinstance(value, DTensor) else own

    def copied(value: Tensor, parameter: Tensor) -> Tensor:
        found["to device"] += local_of(value).nbytes
        return value.clone()

    offload = "lightning_parallel.techniques.offload"
    with mock.patch(f"{offload}._pinned_memory", memory), mock.patch(f"{offload}._on_device", copied):
        yield


def _gradients(module: nn.Module) -> dict[str, int]:
    """How many parameters have a gradient when backward has ended, and how many are reduced over the ranks."""
    trainable = [p for p in module.parameters() if p.requires_grad]
    present = [p.grad for p in trainable if p.grad is not None]
    whole = [gradient for gradient in present if not isinstance(gradient, DTensor)]
    sums = torch.tensor([float(gradient.double().abs().sum()) for gradient in whole], dtype=torch.float64)
    differing = 0
    if len(whole) and dist.is_initialized():
        others = [torch.empty_like(sums) for _ in range(dist.get_world_size())]
        dist.all_gather(others, sums)
        differing = int(sum((other - sums).abs() > 1e-12 for other in others).bool().sum())
    return {"gradients": len(present), "reduced": len(present) - differing, "parameters": len(trainable)}

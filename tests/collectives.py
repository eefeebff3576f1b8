"""Count what ranks send, by kind and dtype."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_parallel import build_strategy
from tests.data import loader
from tests.models.cases import CASES
from tests.parity import make_trainer

EARLIER = 4
"""Windows before the one in which is counted."""
_KINDS = {"allgather": "gather", "all_gather": "gather", "allreduce": "all_reduce"}


class Collectives(TorchDispatchMode):
    """Notes kind and dtype of each collective while it is on; torch's versions differ in how they spell them."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[tuple[str, torch.dtype]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func.overloadpacket.__name__
            kind = next((kind for part, kind in _KINDS.items() if part in name), name)
            kind = "reduce_scatter" if "reduce_scatter" in name else kind
            dtype = next((leaf.dtype for leaf in tree_leaves(args) if isinstance(leaf, Tensor)), torch.uint8)
            self.counts[kind, dtype] += 1
        return func(*args, **(kwargs or {}))


class Counts:
    """What a `Collectives` noted."""

    def __init__(self, counts: dict[tuple[str, torch.dtype], int]) -> None:
        self.counts = counts

    def number(self, kind: str) -> int:
        return sum(number for (name, _), number in self.counts.items() if name == kind)

    def dtypes(self, kind: str) -> set[torch.dtype]:
        return {dtype for name, dtype in self.counts if name == kind}

    def __repr__(self) -> str:
        return repr(self.counts)


def collectives_of_a_window(strategy: Any, accumulate: int = 1, case: str = "byte_gpt", **kwargs: Any) -> Counts:
    """What one rank sends in a window: from the start of its first microstep to its update.

    It is the window after `EARLIER`: in the first backwards, and in those whose number is a power of two, the package
    also looks for what is rare.
    """
    mode = Collectives()

    class Module(CASES[case]):  # type: ignore[misc]
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == EARLIER * accumulate:
                mode.__enter__()

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            if self.trainer.global_step == EARLIER:
                mode.__exit__(None, None, None)

    size = dist.get_world_size()
    built = build_strategy(strategy) if isinstance(strategy, str) else strategy
    trainer = make_trainer(built, size, accumulate_grad_batches=accumulate, **kwargs)
    trainer.fit(Module(), loader(size, (EARLIER + 1) * accumulate + 1, case))
    return Counts(dict(mode.counts))

"""Calls of a module that is cut into stages from outside of a schedule: sampling in a hook, an evaluation with a loop.

All ranks make the call. Each layer runs on the rank that has it, which gives its result to all; so does, at the end of
the outermost call of a module, whoever has computed its result. No gradient comes back from there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_parallel.module.given_containers import GivenContainers, has_containers
from lightning_parallel.module.kv_cache import is_cache
from lightning_parallel.module.placeholders import is_placeholder
from lightning_parallel.techniques.pipeline.turns import Turns


class OutsideCalls:
    """Lets all ranks of a pipeline take part in calls from outside of a schedule.

    Args:
        turns: Runs the layers.
        is_in_schedule: Whether a schedule runs at the moment, in which each rank calls its own layers.
        group: The ranks of the pipeline.
        host_group: The same, for host memory.
    """

    def __init__(
        self, turns: Turns, is_in_schedule: Callable[[], bool], group: ProcessGroup, host_group: ProcessGroup
    ) -> None:
        self._turns, self._is_in_schedule, self._group, self._host_group = turns, is_in_schedule, group, host_group
        self._depth = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> OutsideCalls:
        """Itself, as process groups have no copies: copying a module ends at the first tensor of another stage."""
        return self

    def apply(self, module: nn.Module) -> None:
        """Put hooks on the modules outside of the layers that have parameters, in place.

        Args:
            module: The whole module.
        """
        for path, child in module.named_modules():
            if not self._turns.is_in_layer(f"{path}.") and next(child.parameters(), None) is not None:
                child.register_forward_pre_hook(self._enter)
                child.register_forward_hook(self._leave, always_call=True)

    @torch.no_grad()
    def call(
        self, index: int, layer: nn.Module, run: Callable[..., Any], forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Return what a layer returns, on every rank: a `CallOfLayer`. A collective of the pipeline."""
        given = args, kwargs
        used = self.shared(given)
        containers = GivenContainers(given, used) if has_containers(given) else None
        result = self._turns.call(index, layer, run, forward, *used)
        if containers is not None:
            containers.give_back()
        return result

    @torch.no_grad()
    def shared(self, values: Any) -> Any:
        """Return `values` with what other ranks have computed in place of placeholders. A collective of the pipeline.

        Args:
            values: Nested containers, of one structure on all ranks.
        """
        leaves, spec = tree_flatten(values, is_leaf=is_cache)
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        is_here = torch.tensor([not is_placeholder(leaves[place]) for place in places], dtype=torch.uint8)
        ranks = [torch.empty_like(is_here) for _ in range(self._host_group.size())]
        if places:
            dist.all_gather(ranks, is_here, group=self._host_group)
        for place, *known in zip(places, *(flags.tolist() for flags in ranks), strict=True):
            if not all(known) and any(known):
                leaves[place] = self._from_rank(known.index(1), leaves[place])
        return tree_unflatten(leaves, spec)

    def _from_rank(self, source: int, value: Tensor) -> Tensor:
        room = torch.empty(value.shape, dtype=value.dtype, device=value.device)
        found = value.detach().contiguous() if source == self._group.rank() else room
        dist.broadcast(found, group=self._group, group_src=source)
        return found

    def _enter(self, module: nn.Module, args: Any) -> None:
        if not self._is_in_schedule():
            self._depth += 1

    def _leave(self, module: nn.Module, args: Any, result: Any) -> Any:
        if self._is_in_schedule():
            return None
        self._depth -= 1
        # Nothing is returned where there was an error: the others will not come.
        return None if self._depth or result is None else self.shared(result)

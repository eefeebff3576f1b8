"""Watch over the code between layers where each rank has a part of the positions.

What is computed there is right, but nobody adds up the ranks' gradients of parameters that it uses. And a layer that is
called before a sequence is split, or where it is split already, would compute with parts of parts.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from lightning_parallel.errors import ConfigurationError
from lightning_parallel.module.hidden_states import ENDS_LAYER, Lengths, hidden_in


def watch_between(
    module: nn.Module, stacks: Sequence[Sequence[tuple[str, nn.Module]]], lengths: Sequence[Lengths]
) -> None:
    """Refuse steps that would compute wrong gradients between the layers, by hooks. No collective.

    Args:
        module: The whole module.
        stacks: For each stack its layers with their paths, in the order in which they run.
        lengths: For each stack, the lengths of sequences that are split.
    """
    for layers, each in zip(stacks, lengths, strict=True):
        watch, each.layers = _Between(module, each), [layer for _, layer in layers]
        for index, (path, layer) in enumerate(layers):
            enter = functools.partial(watch.enter, path, is_first=index == 0)
            layer.register_forward_pre_hook(enter, with_kwargs=True)
            layer.register_forward_hook(functools.partial(watch.leave, is_last=index == len(layers) - 1))


class _Between:
    """The results of one stack since a sequence entered it.

    Args:
        module: The whole module.
        lengths: The lengths of the stack's sequences.
    """

    def __init__(self, module: nn.Module, lengths: Lengths) -> None:
        self._module, self._lengths = module, lengths
        self._results: set[Node] = set()

    def enter(self, path: str, layer: nn.Module, args: Any, kwargs: Any, *, is_first: bool) -> None:
        """Look at what a layer is given."""
        if is_first:
            self._lengths.check_left()
            self._lengths.entered = path
            self._results.clear()
        elif not self._lengths.entered:
            raise ConfigurationError(
                [
                    f"{path} is called before the first layer of its stack, which splits sequences, or after the last "
                    f"one, which joins them; let every step go through the layers from first to last, or give "
                    f"{self._lengths.remedy}"
                ]
            )
        elif parameters := self._used_since(hidden_in(args, kwargs)):
            names = {parameter: name for name, parameter in self._module.named_parameters()}
            found = ", ".join(sorted(names.get(each, str(list(each.shape))) for each in parameters)[:4])
            raise ConfigurationError(
                [
                    f"code before {path} computes its hidden states with {found} outside of the layers, where a rank "
                    "has some of the positions, and would have the gradient of these alone; use the parameters inside "
                    f"of a layer, or give {self._lengths.remedy}"
                ]
            )

    def leave(self, layer: nn.Module, args: Any, output: Any, *, is_last: bool) -> None:
        """Note what a layer has returned."""
        if is_last:
            self._lengths.entered = ""
            self._results.clear()
            return
        first = output[0] if isinstance(output, tuple) else output
        if isinstance(first, Tensor) and first.grad_fn is not None:
            self._results.add(first.grad_fn)

    def _used_since(self, hidden: Any) -> list[nn.Parameter]:
        """Parameters that `hidden` depends on otherwise than by results of earlier layers."""
        if not isinstance(hidden, Tensor) or not torch.is_grad_enabled():
            return []
        left, seen, found = [hidden.grad_fn], set(self._results), []
        while left:
            node = left.pop()
            if node is None or node in seen or hasattr(node, ENDS_LAYER):
                continue
            seen.add(node)
            if isinstance(variable := getattr(node, "variable", None), nn.Parameter):
                found.append(variable)
            left += [each for each, _ in node.next_functions]
        return found

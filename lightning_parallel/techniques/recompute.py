"""Activation recomputation: keep fewer activations of each layer, and compute them again in backward.

Source: Chen et al. 2016, "Training deep nets with sublinear memory cost"; Korthikanti et al. 2022 for keeping
attention; `torch.utils.checkpoint` without reentrance, which replays the random numbers and the autocast of forward.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lightning_parallel import _torch
from lightning_parallel.errors import ConfigurationError
from lightning_parallel.module.kv_cache import is_cache, without_fresh_cache

CHOICES = "'none', 'full', 'every:2' (every second layer), 'selective', 'budget:0.5' (half of what backward keeps)"


@dataclass(frozen=True)
class Recompute:
    """Rule for which activations are recomputed, as `parse_recompute` read it.

    Args:
        kind: The treatment of a layer.
        every: One layer in so many is treated.
        budget: The share of activations to keep for backward, from 0 to 1; only for ``"budget"``.
    """

    kind: Literal["none", "full", "selective", "budget"]
    every: int = 1
    budget: float = 1.0


def parse_recompute(recompute: str) -> Recompute | None:
    """Read ``"none"``, ``"full"``, ``"every:n"``, ``"selective"`` or ``"budget:x"``; ``None`` for anything else."""
    kind, _, number = recompute.partition(":")
    if recompute in ("none", "full", "selective"):
        return Recompute(recompute)  # type: ignore[arg-type]
    if kind == "every" and number.isascii() and number.isdecimal() and int(number) >= 1:
        return Recompute("full", every=int(number))
    try:
        budget = float(number)
    except ValueError:
        return None
    return Recompute("budget", budget=budget) if kind == "budget" and 0 <= budget <= 1 else None


def recompute_violations(recompute: str, *, compiles: bool) -> list[str]:
    """Reasons why `recompute` cannot be used; empty if it can.

    Args:
        recompute: As the user wrote it.
        compiles: Whether the layers are compiled.
    """
    rule = parse_recompute(str(recompute))
    if rule is None:
        return [f"recompute={recompute!r} is unknown; possible: {CHOICES}"]
    if rule.kind == "budget" and not compiles:
        return [
            f"recompute={recompute!r} is a choice of the compiler, but compile='none'; give compile='layers', or "
            "recompute='selective', which needs none"
        ]
    return []


def statistics_violations(layers: Sequence[nn.Module], recompute: str, *, compiles: bool) -> list[str]:
    """Reasons why `layers` cannot be both compiled and recomputed; empty if they can.

    Args:
        layers: The layers of the stacks.
        recompute: As the user wrote it.
        compiles: Whether the layers are compiled.
    """
    rule = parse_recompute(str(recompute))
    if rule is None or rule.kind in ("none", "budget") or not compiles:
        return []
    kinds = {type(child).__name__ for layer in layers for child in layer.modules() if has_statistics(child)}
    if not kinds:
        return []
    return [
        f"recompute={recompute!r} with compile='layers': running statistics of {', '.join(sorted(kinds))} in the "
        "layers would count each batch twice; give compile='none', or recompute='budget:0.5', which leaves them alone"
    ]


def apply_recompute(layers: Sequence[nn.Module], recompute: Recompute) -> None:
    """Let `layers` recompute activations in backward, in place. Names in the state dict stay.

    Evaluation, and training under ``torch.no_grad()``, run as before. ``"budget"`` is left to `apply_compile`.

    Args:
        layers: The layers of the stacks, in order.
        recompute: The rule, as `parse_recompute` read it.
    """
    if recompute.kind in ("none", "budget"):
        return
    run: Callable[..., Any] = _run_selective if recompute.kind == "selective" else _run_full
    for layer in layers[:: recompute.every]:
        layer.__class__ = _recomputing(cast(Any, type(layer)), run)


@functools.cache
def _recomputing(cls: type[Any], run: Callable[..., Any]) -> type[nn.Module]:
    """Make a subclass of `cls` whose `forward` is recomputed.

    Hooks, and with them the gathering of parameters, stay outside: FSDP2 gathers again for backward by itself.
    """
    written: weakref.WeakKeyDictionary[nn.Module, set[tuple[nn.Module, str]]] = weakref.WeakKeyDictionary()

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return cls.forward(self, *args, **kwargs)
        if torch.compiler.is_compiling():
            return run(functools.partial(cls.forward, self), contextlib.nullcontext(), *args, **kwargs)
        args = tuple(_without_cache(self, args))
        kwargs = dict(zip(kwargs, _without_cache(self, kwargs.values()), strict=True))
        buffers = _WrittenBuffers(self, written)
        result = run(functools.partial(cls.forward, self), buffers, *args, **kwargs)
        buffers.close()
        return result

    return _torch.modules.subclass_like(cls, forward)


def _without_cache(layer: nn.Module, values: Iterable[Any]) -> list[Any]:
    left = without_fresh_cache(layer, values)
    if any(is_cache(value) for value in left):
        raise ConfigurationError(
            [
                f"recompute: {type(layer).__name__} is given a cache of keys and values that holds some already, to "
                "which a second forward would add again; leave recompute out"
            ]
        )
    return left


def has_statistics(module: nn.Module) -> bool:
    """Whether forward writes into running statistics: BatchNorm's kernels do so without raising a buffer's version."""
    return module.training and bool(getattr(module, "track_running_stats", False))


class _WrittenBuffers(contextlib.AbstractContextManager[None]):
    """Context for the second run of a layer, which sees copies of its buffers as they were before the first run.

    Otherwise BatchNorm would count each batch twice, and spectral norm would compute with another vector. The first
    forward shows which buffers are written; from then on only these are copied.

    Args:
        layer: The layer, before its first run.
        written: Layer -> the buffers that its forward writes, as far as known.
    """

    def __init__(
        self, layer: nn.Module, written: weakref.WeakKeyDictionary[nn.Module, set[tuple[nn.Module, str]]]
    ) -> None:
        self._written = written.get(layer)
        own = {(m, name): b for m in layer.modules() for name, b in m._buffers.items() if b is not None}
        self._versions = {key: (buffer, buffer._version) for key, buffer in own.items()}
        self._before = {key: b.clone() for key, b in own.items() if self._written is None or key in self._written}
        self._known = written.setdefault(layer, set())
        self._now: dict[tuple[nn.Module, str], Tensor] = {}

    def close(self) -> None:
        """End the first run, and note which buffers it wrote."""
        for (module, name), (buffer, version) in self._versions.items():
            if module._buffers[name] is not buffer or buffer._version != version or has_statistics(module):
                self._known.add((module, name))
        self._before = {key: value for key, value in self._before.items() if key in self._known}
        self._versions = {}

    def __enter__(self) -> None:
        for module, name in self._before:
            self._now[module, name] = module._buffers[name]  # type: ignore[assignment]
            module._buffers[name] = self._before[module, name].clone()

    def __exit__(self, *_: object) -> None:
        for (module, name), buffer in self._now.items():
            module._buffers[name] = buffer
        self._now = {}


def _run_full(function: Callable[..., Any], again: Any, *args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_compiling():
        return checkpoint(function, *args, use_reentrant=False, **kwargs)
    contexts = (contextlib.nullcontext(), again)
    return checkpoint(function, *args, use_reentrant=False, context_fn=lambda: contexts, **kwargs)


def _run_selective(function: Callable[..., Any], again: Any, *args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_compiling():
        kept = _keep_attention_and_half_the_products
        return checkpoint(function, *args, use_reentrant=False, context_fn=kept, **kwargs)

    def contexts() -> tuple[Any, Any]:
        first, second = _keep_attention_and_half_the_products()
        return first, _both(again, second)

    return checkpoint(function, *args, use_reentrant=False, context_fn=contexts, **kwargs)


@contextlib.contextmanager
def _both(outer: Any, inner: Any) -> Iterator[None]:
    # Copies of buffers are made outside of `inner`, which compares the operations of both runs.
    with outer, inner:
        yield


def _keep_attention_and_half_the_products() -> Any:
    # Counted apart for forward and recomputation, so that both keep the same products.
    products = {False: 0, True: 0}

    def policy(ctx: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operation in _torch.tensors.MATRIX_PRODUCTS:
            products[ctx.is_recompute] += 1
            is_kept = products[ctx.is_recompute] % 2 == 1
        else:
            is_kept = operation in _torch.tensors.ATTENTIONS
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)

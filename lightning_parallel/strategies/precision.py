"""Lightning's precision plugins, clipping over shards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch.plugins import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_parallel import _torch
from lightning_parallel.dtypes import POLICIES, DtypePolicy
from lightning_parallel.techniques.clipping import clip_gradients_by_norm, clip_gradients_by_value


class _ClipsShards(Precision):
    def __reduce__(self) -> tuple[Any, ...]:
        # By the plugin that it stands for: under the name of this class, pickle would find that one's class.
        plain = next(plain for plain, sharded in _SHARDED.items() if sharded is type(self))
        return _sharded_again, (plain, dict(vars(self)))

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        clip_gradients_by_norm(self.main_params(optimizer), clip_val)

    @override
    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        clip_gradients_by_value(self.main_params(optimizer), clip_val)


class ShardedPrecision(_ClipsShards):
    """``32-true``, or whatever the module has."""


class ShardedHalfPrecision(_ClipsShards, HalfPrecision):
    """``bf16-true`` and ``16-true``."""


class ShardedDoublePrecision(_ClipsShards, DoublePrecision):
    """``64-true``."""


class ShardedMixedPrecision(_ClipsShards, MixedPrecision):
    """``bf16-mixed`` and ``16-mixed``."""

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: Any, closure: Any, **kwargs: Any
    ) -> Any:
        if self.scaler is None:
            return super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)
        with _torch.fsdp.unscaling_shards(self.scaler):
            return super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)


_SHARDED: dict[type[Precision], type[Precision]] = {
    Precision: ShardedPrecision,
    HalfPrecision: ShardedHalfPrecision,
    DoublePrecision: ShardedDoublePrecision,
    MixedPrecision: ShardedMixedPrecision,
}
for _plain, _sharded in _SHARDED.items():
    # Lightning files a plugin's state in checkpoints under this name: it stays what plain Lightning looks for.
    _sharded.__qualname__ = _plain.__qualname__


def sharded_precision(plugin: Precision | None) -> Precision | None:
    """The same plugin with clipping over shards; a user's own kind of plugin is left as it is."""
    if plugin is None or type(plugin) not in _SHARDED:
        return plugin
    return _sharded_again(type(plugin), vars(plugin))


def _sharded_again(plain: type[Precision], state: Mapping[str, Any]) -> Precision:
    cls = _SHARDED[plain]
    sharded = cls.__new__(cls)
    sharded.__dict__.update(state)
    return sharded


def sharding_dtypes(plugin: Precision) -> DtypePolicy:
    """The dtypes of gathering and reducing that belong to the Trainer's precision; unknown ones are refused."""
    return POLICIES.get(str(plugin.precision), DtypePolicy())


def module_dtype(plugin: Precision) -> torch.dtype | None:
    """The dtype to which `plugin` converts a module; ``None`` if it leaves what the module has."""
    return {"bf16-true": torch.bfloat16, "16-true": torch.float16, "64-true": torch.float64}.get(str(plugin.precision))


def widen(module: nn.Module, plugin: Precision) -> None:
    """Convert a module to fp64 before a checkpoint is loaded into it, if `plugin` would do so afterwards.

    Lightning loads first, which rounds weights to the dtype with which the module was built.
    """
    if isinstance(plugin, DoublePrecision):
        plugin.convert_module(module)

"""Why a strategy cannot run on these devices or with this module: every reason at once, before anything starts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch import callbacks
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.utils._pytree import tree_leaves

from lightning_parallel.parallelize import parallelized
from lightning_parallel.policies import LayerPolicies
from lightning_parallel.ranks.degrees import Degrees
from lightning_parallel.ranks.memory import host_memory
from lightning_parallel.techniques.compiling import compile_violations
from lightning_parallel.techniques.context.attention import ATTENTIONS
from lightning_parallel.techniques.deferred_init.deferral import unrecorded_meta_tensors
from lightning_parallel.techniques.deferred_init.record import InitRecord
from lightning_parallel.techniques.float8 import float8_violations
from lightning_parallel.techniques.recompute import recompute_violations
from lightning_parallel.techniques.sharding import is_sharded
from lightning_parallel.techniques.update_in_backward import update_in_backward_violations

_AVERAGING = tuple(
    getattr(callbacks, name)
    for name in ("StochasticWeightAveraging", "WeightAveraging")
    if hasattr(callbacks, name)  # the second since Lightning 2.6
)
_POST_ACCUMULATE = "_post_accumulate_grad_hooks"

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule
    from lightning.pytorch.strategies import Strategy


def device_violations(
    *, num_ranks: int, num_nodes: int, device_type: str, syncs_batchnorm: bool, backend: str | None
) -> list[str]:
    """Reasons that lie in the devices and in what the Trainer was given."""
    found = []
    if dist.is_initialized() and dist.get_world_size() != num_ranks:
        found.append(
            f"devices x nodes = {num_ranks}, but this process already belongs to a group of {dist.get_world_size()} "
            f"ranks; give devices={dist.get_world_size() // num_nodes} or start a new process"
        )
    if syncs_batchnorm and device_type != "cuda":
        found.append(
            f"sync_batchnorm=True needs CUDA devices, but the device is {device_type}: torch's SyncBatchNorm has no "
            "other kernel; leave it out (statistics are then those of rank 0, as under DDP)"
        )
    if backend == "nccl" and device_type != "cuda":
        found.append(
            f"process_group_backend='nccl' needs CUDA devices, but the device is {device_type}; leave it out, or give "
            "'gloo'"
        )
    elif backend is not None and not dist.is_backend_available(backend.partition(":")[2] or backend):
        found.append(f"process_group_backend={backend!r} is not available here; leave it out, or give 'gloo'")
    return found


def module_violations(module: LightningModule, *, is_fitting: bool, record: InitRecord | None = None) -> list[str]:
    """Reasons that lie in the module."""
    found = []
    if is_fitting and not any(parameter.requires_grad for parameter in module.parameters()):
        count = sum(1 for _ in module.parameters())
        found.append(
            f"{type(module).__name__} has no trainable parameters ({count} parameters, all frozen); there is nothing "
            "to train: unfreeze some, or call validate, test or predict"
        )
    if made_on_meta := unrecorded_meta_tensors(module, record):
        found.append(
            f"{len(made_on_meta)} tensors of {type(module).__name__} are on the meta device and nobody knows their "
            f"values: {', '.join(made_on_meta[:6])}. Build these modules in configure_model (without "
            "torch.device('meta'): their initialisation is recorded there and replayed shard by shard)"
        )
    return found


def sharded_elsewhere_violations(strategy: object, module: nn.Module) -> list[str]:
    """Reasons that lie in what an earlier strategy left: a module too large to be made whole on every rank."""
    if not _is_left_parallel(module):
        return []
    return [
        f"the module is still sharded by an earlier fit, which ended in an error, or it is too large to be whole in "
        f"the memory of one rank; {type(strategy).__name__} needs it whole. Use a sharding strategy, or start a new "
        "process from a checkpoint"
    ]


def _is_left_parallel(module: nn.Module) -> bool:
    # Without other ranks to share with, what is cut into stages or split is no unit of FSDP2.
    return is_sharded(module) or parallelized(module) is not None


def unshardable_violations(module: LightningModule) -> list[str]:
    """Reasons that lie in what sharding does: other parameter objects stand in the place of the module's own."""
    found = []
    hooked = [name for name, p in module.named_parameters() if p._backward_hooks or getattr(p, _POST_ACCUMULATE, None)]
    if hooked:
        found.append(
            f"{len(hooked)} parameters have hooks of their own, which sharding would not run: {', '.join(hooked[:4])}; "
            "hook modules instead (register_full_backward_hook), or use zero1_custom"
        )
    if kept := _kept_elsewhere(module):
        found.append(
            f"parameters are kept outside of the modules that own them, where sharding cannot replace them: "
            f"{', '.join(kept[:4])}; read them from their module in each step, or use zero1_custom"
        )
    sparse = [path for path, child in module.named_modules() if getattr(child, "sparse", False) is True]
    if sparse:
        found.append(f"sparse gradients cannot be sharded: {', '.join(sparse[:4])}; give sparse=False, or ddp_custom")
    trainer: Any = module._trainer
    used = trainer.callbacks if trainer is not None else ()
    averaging = [type(callback).__name__ for callback in used if isinstance(callback, _AVERAGING)]
    if averaging:
        found.append(f"{', '.join(averaging)} copies whole parameters, which sharding cuts; use zero1_custom")
    return found


def layer_policy_violations(policies: LayerPolicies, device: torch.device) -> list[str]:
    """Reasons that lie in what is to be done to each layer, on this kind of device."""
    return [
        *recompute_violations(policies.recompute, compiles=policies.compile == "layers"),
        *compile_violations(policies.compile),
        *float8_violations(policies.float8, device),
    ]


def idle_violations(given: Degrees, options: Mapping[str, Sequence[str]]) -> list[str]:
    """Options that belong to a degree which is given as 1, so that they would be ignored.

    A degree that is 1 for want of devices is none: with more of them, the same options have an effect.
    """
    return [
        f"{option} is for {degree} > 1, but {degree}=1; leave it out, or give {degree}=2 or more"
        for degree, chosen in options.items()
        if getattr(given, degree) == 1
        for option in chosen
    ]


def tensor_violations(degrees: Degrees, policies: LayerPolicies, *, sequence: bool) -> list[str]:
    """Reasons that lie in what was given beside ``tensor``."""
    found = []
    if degrees.tensor != 1:
        if policies.float8 not in (None, "none"):
            found.append(f"float8 with tensor={degrees.tensor} is not available in this version; give one of the two")
        if policies.recompute.startswith("budget"):
            found.append(
                f"recompute={policies.recompute!r} with tensor={degrees.tensor}: torch's compiler cannot tell how much "
                "memory a graph takes that holds process groups; give recompute='full', 'every:2' or 'selective'"
            )
    if sequence and degrees.context != 1:
        found.append(
            f"sequence=True with context={degrees.context}: sequences are split over other ranks already; give one of "
            "the two"
        )
    return found


def context_violations(degrees: Degrees, *, attention: str, float8: str | None) -> list[str]:
    """Reasons that lie in what was given beside ``context``."""
    found = []
    if attention not in ATTENTIONS:
        found.append(f"context_attention={attention!r} is not known; possible: {', '.join(ATTENTIONS)}")
    if degrees.context != 1 and str(float8).startswith("tensorwise"):
        found.append(
            f"float8={float8!r} scales by the largest number of a tensor, which is another one in a part of it: "
            f"a layer cannot be compared with itself on the whole; give rowwise, or context=1 in place of "
            f"{degrees.context}"
        )
    return found


def in_backward_violations(module: LightningModule, *, offloads_optimizer: bool) -> list[str]:
    """Reasons that lie in updating parameters while backward still runs."""
    trainer: Any = module._trainer
    if trainer is None:
        return []
    accumulates = [c for c in trainer.callbacks if isinstance(c, callbacks.GradientAccumulationScheduler)]
    found = update_in_backward_violations(
        clips=bool(trainer.gradient_clip_val),
        scales=str(trainer.precision) == "16-mixed",
        num_microsteps=max([trainer.accumulate_grad_batches, *(max(c.scheduling.values()) for c in accumulates)]),
        is_manual=not module.automatic_optimization,
    )
    hooks = ("configure_gradient_clipping", "on_before_optimizer_step", "on_after_backward", "optimizer_step")
    if finding_none := [name for name in hooks if is_overridden(name, module)]:
        found.append(
            f"optimizer_in_backward=True has used the gradients up before {', '.join(finding_none)} of "
            f"{type(module).__name__} is called; leave one of the two out"
        )
    if offloads_optimizer:
        found.append(
            "optimizer_in_backward=True and offload='optimizer': the state would travel for each parameter; "
            "give offload='all' or leave one of the two out"
        )
    return found


def _kept_elsewhere(module: nn.Module) -> list[str]:
    """Containers on a module that hold parameters, at any depth; torch's recurrent layers keep theirs up to date."""
    parameters = set(module.parameters())
    return [
        f"{path}.{name}".lstrip(".")
        for path, child in module.named_modules()
        if not isinstance(child, nn.RNNBase)
        for name, value in vars(child).items()
        if name not in ("_parameters", "_buffers", "_modules") and not isinstance(value, nn.Parameter)
        if any(isinstance(item, nn.Parameter) and item in parameters for item in tree_leaves(value))
    ]


def forward_method_violations(module: nn.Module, methods: Iterable[str]) -> list[str]:
    """Reasons that lie in `forward_methods`."""
    found = []
    for method in methods:
        path, _, name = method.rpartition(".")
        holder = dict(module.named_modules()).get(path)
        if holder is None or not callable(getattr(holder, name, None)):
            found.append(
                f"forward_methods has {method!r}, but {type(module).__name__} has no such method; give dotted paths "
                "such as 'model.generate'"
            )
    return found


@contextlib.contextmanager
def without_unmovable_module(strategy: Strategy) -> Iterator[None]:
    """Lightning's teardown moves the module to the host.

    One that was refused on the meta device has no data to move, and the shards of one whose step ended in an error are
    held by the step's graph: torch's complaint would hide the error.
    """
    module = strategy.lightning_module
    if module is not None:
        is_unmade = any(tensor.is_meta for tensor in chain(module.parameters(), module.buffers()))
        if is_unmade or _is_left_parallel(module):
            strategy._lightning_module = None
    yield
    strategy._lightning_module = module


def module_bytes(module: nn.Module) -> int:
    """Bytes of all parameters, wherever they are."""
    return sum(parameter.numel() * parameter.itemsize for parameter in module.parameters())


def rank_share_of_host_memory(local_world_size: int) -> int:
    """Bytes of host memory for each rank of this machine, within the limit of a container."""
    return host_memory() // max(1, local_world_size)

"""Take over the optimizers that the user's module made, object, groups and schedulers unchanged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import LBFGS, Adafactor, Optimizer

from lightning_parallel.checkpoint.full_state import make_optimizer_sharded
from lightning_parallel.errors import check
from lightning_parallel.module.placeholders import is_placeholder
from lightning_parallel.techniques.local_update import is_elementwise
from lightning_parallel.techniques.optimizer_sharding import shards_itself, wrapper_violations

_UNSHARDABLE: dict[type[Optimizer], str] = {
    LBFGS: "LBFGS keeps one history of all parameters together, which cannot be sharded; use ddp_custom",
    Adafactor: "torch's Adafactor takes means of whole matrices, for which DTensor has no rule; use zero1_custom",
}
_SHARDS_ITSELF = (
    "ZeroRedundancyOptimizer deals whole parameters out to the ranks by itself; give the optimizer of its "
    "optimizer_class, whose state is sharded here, or use ddp_custom"
)


def adopt_optimizers(
    optimizers: Sequence[Optimizer], module: nn.Module, replaced: Mapping[Tensor, Tensor] | None = None
) -> None:
    """Let `optimizers` train the parameters that the module has now.

    Args:
        optimizers: As the module made them; changed in place.
        module: The module as it is now.
        replaced: The module's own parameter -> the tensor that has replaced it.

    Raises:
        ConfigurationError: For an optimizer that trains tensors which are no parameters of the module: nobody reduces
            their gradients, and the ranks would drift apart.
    """
    if replaced:
        are_shards = any(isinstance(tensor, DTensor) for tensor in replaced.values())
        found = [
            _UNSHARDABLE[type(o)] for o in optimizers if type(o) in _UNSHARDABLE and (are_shards or not _is_alone(o))
        ]
        found += (_SHARDS_ITSELF for optimizer in optimizers if shards_itself(optimizer))
        check([*found, *(words for optimizer in optimizers for words in wrapper_violations(optimizer))])
    for optimizer in optimizers:
        make_optimizer_sharded(optimizer, replaced or {})
    check(_strangers(optimizers, module))
    for optimizer in optimizers:
        if not is_elementwise(optimizer):
            _separate_mixed_groups(optimizer)


def _is_alone(optimizer: Optimizer) -> bool:
    """Whether it updates whole parameters one by one, so that each pipeline stage can update its own."""
    return type(optimizer) is Adafactor


def tell_missing_states(optimizers: Sequence[Optimizer], states: Sequence[object]) -> None:
    """Say of how many optimizers a checkpoint has the state, where it is not that of each.

    Args:
        optimizers: The module's.
        states: Those of the checkpoint, from which a hook may have taken some.
    """
    if len(states) != len(optimizers):
        anew = ", ".join(type(optimizer).__name__ for optimizer in optimizers[len(states) :])
        rest = f"without a state: {anew}" if anew else "those beyond are not used"
        rank_zero_info(f"states of optimizers in the checkpoint: {len(states)}, optimizers: {len(optimizers)}; {rest}")


def _strangers(optimizers: Sequence[Optimizer], module: nn.Module) -> list[str]:
    known = set(module.parameters())
    found = []
    for optimizer in optimizers:
        shapes = [tuple(p.shape) for group in optimizer.param_groups for p in group["params"] if p not in known]
        if shapes:
            found.append(
                f"{type(optimizer).__name__} trains {len(shapes)} tensors that are no parameters of the module "
                f"(shapes {', '.join(map(str, shapes[:4]))}), so nobody would average their "
                "gradients over the ranks; register them on the module, or leave them out"
            )
    return found


def _separate_mixed_groups(optimizer: Optimizer) -> None:
    """Step parameters of mixed groups one by one: torch's fused and foreach steps take those of one mesh only."""
    for group in optimizer.param_groups:
        kinds = {p.device_mesh if isinstance(p, DTensor) else None for p in group["params"] if not is_placeholder(p)}
        given = [name for name in ("foreach", "fused") if group.get(name)]
        if len(kinds) > 1 and given:
            group.update(dict.fromkeys(given, False))
            rank_zero_info(
                f"{type(optimizer).__name__}: a group holds parameters that are sharded in different ways, so "
                f"{' and '.join(given)} is off there"
            )

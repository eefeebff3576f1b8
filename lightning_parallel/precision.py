"""Which dtype is used for what: a frozen rule with no model in it. Layer 1."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy


@dataclass(frozen=True, kw_only=True)
class DtypePolicy:
    """The dtypes of a sharded training step; ``None`` leaves what the module has.

    Args:
        param: Parameters while they are gathered, and so the traffic of gathering them.
        reduce: Gradients while they are reduced.
        output: What a unit's forward returns.

    Example:
        >>> DtypePolicy(param=torch.bfloat16, reduce=torch.float32)
    """

    param: torch.dtype | None = None
    reduce: torch.dtype | None = None
    output: torch.dtype | None = None

    @property
    def fsdp(self) -> MixedPrecisionPolicy:
        """The same rule in FSDP2's words. Inputs are not cast: autocast decides operation by operation."""
        return MixedPrecisionPolicy(
            param_dtype=self.param, reduce_dtype=self.reduce, output_dtype=self.output, cast_forward_inputs=False
        )


POLICIES: dict[str, DtypePolicy] = {
    "32-true": DtypePolicy(),
    "64-true": DtypePolicy(),
    "bf16-true": DtypePolicy(),
    "16-true": DtypePolicy(),
    "bf16-mixed": DtypePolicy(param=torch.bfloat16, reduce=torch.float32),
    "16-mixed": DtypePolicy(param=torch.float16, reduce=torch.float32),
}
"""`Trainer(precision=...)` -> the rule under a sharding strategy; a precision that is missing here is refused."""


def precision_violations(precision: object) -> list[str]:
    """Why `precision` cannot be used under a sharding strategy; empty if it can."""
    if precision in POLICIES:
        return []
    return [f"precision={precision!r} is not possible under this strategy; possible: {', '.join(POLICIES)}"]

"""The dtypes of a sharded training step: a frozen rule with no model in it."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_parallel.errors import check


@dataclass(frozen=True, kw_only=True)
class DtypePolicy:
    """The dtypes of a sharded training step; ``None`` leaves what the module has.

    Args:
        param: Parameters while they are gathered, and so the traffic of gathering them.
        reduce: Gradients while they are reduced; without it as `param`.
        output: What a unit's forward returns.
        buffer: Floating-point buffers while their module's forward runs, but for the statistics of BatchNorm; the
            buffers themselves keep their dtype.

    Raises:
        ConfigurationError: For a name that is no floating-point dtype of torch.

    Example:
        >>> DtypePolicy(param=torch.bfloat16, reduce="float32")
    """

    param: torch.dtype | str | None = None
    reduce: torch.dtype | str | None = None
    output: torch.dtype | str | None = None
    buffer: torch.dtype | str | None = None

    def __post_init__(self) -> None:
        check(_dtype_violations(self))
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, str):  # as in YAML and on the command line
                # The dataclass is frozen; this is its documented way round that in `__post_init__`.
                object.__setattr__(self, each.name, getattr(torch, value))

    @property
    def buffers(self) -> torch.dtype | None:
        """:attr:`buffer`, resolved."""
        return _dtype(self.buffer)

    @property
    def fsdp(self) -> MixedPrecisionPolicy:
        """The same rule as FSDP2's policy."""
        return MixedPrecisionPolicy(
            param_dtype=_dtype(self.param),
            # Always given: without it, torch before 2.15 takes the dtype of `param`, and later the parameters' own.
            reduce_dtype=_dtype(self.reduce) or _dtype(self.param),
            output_dtype=_dtype(self.output),
            # Autocast decides for each operation; integers and masks among the inputs would be cast as well.
            cast_forward_inputs=False,
        )


def _dtype(value: torch.dtype | str | None) -> torch.dtype | None:
    assert not isinstance(value, str)
    return value


def _dtype_violations(policy: DtypePolicy) -> list[str]:
    found = []
    for each in fields(policy):
        value = getattr(policy, each.name)
        dtype = getattr(torch, value, None) if isinstance(value, str) else value
        if value is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            found.append(
                f"DtypePolicy({each.name}={value!r}) is no floating-point dtype; give float32, bfloat16 or float16, by "
                "name or as torch.bfloat16"
            )
    return found


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
    """Reasons why `precision` cannot be used under a sharding strategy; empty if it can."""
    if precision in POLICIES:
        return []
    return [f"precision={precision!r} is not possible under this strategy; possible: {', '.join(POLICIES)}"]

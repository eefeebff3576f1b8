"""Dtypes and shapes of what stages of a pipeline pass on, as numbers that can be announced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

PASSED_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.bool)
MOST_DIMS = 8
HEADER = 3 + MOST_DIMS
"""Numbers in an announcement: dtype, whether it wants a gradient, number of dimensions, sizes."""


@dataclass(frozen=True)
class Form:
    """Dtype, shape and requires_grad of an incoming tensor."""

    dtype: torch.dtype
    wants_gradient: bool
    sizes: tuple[int, ...]

    def header(self) -> list[int]:
        """The same as `HEADER` numbers."""
        found = [PASSED_DTYPES.index(self.dtype), int(self.wants_gradient), len(self.sizes), *self.sizes]
        return found + [0] * (HEADER - len(found))

    @classmethod
    def announced(cls, header: Sequence[int]) -> Form:
        """The form that was announced by these numbers."""
        kind, wants_gradient, ndim, *sizes = header
        return cls(PASSED_DTYPES[kind], bool(wants_gradient), tuple(sizes[:ndim]))


def in_words(forms: Sequence[Form]) -> str:
    """Name the forms of several tensors.

    Args:
        forms: The forms.
    """
    return " and ".join(f"{str(form.dtype).removeprefix('torch.')} of shape {list(form.sizes)}" for form in forms)


def forms_of(passed: Sequence[Tensor]) -> list[Form]:
    """Describe the tensors that a stage sends on.

    Hidden states always want a gradient, so that each boundary sends one for each microbatch, as the schedule expects.

    Args:
        passed: Hidden states, `[batch, length, width]`, then side inputs.
    """
    return [Form(t.dtype, i == 0 or t.requires_grad, tuple(t.shape)) for i, t in enumerate(passed)]

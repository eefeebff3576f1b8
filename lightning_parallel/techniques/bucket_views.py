"""Gradients that DDP keeps in its buckets, put back where user code has given them other memory.

With `gradient_as_bucket_view`, a gradient is a view of a bucket, and DDP writes each step's gradient into the very
tensor that it has handed out. ``p.grad.data = p.grad.data + ...`` takes that tensor out of its bucket: from the next
step on, DDP would reduce a bucket that nobody writes, and each rank would train with its own gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class BucketViews:
    """Notes where gradients are after a backward, and puts them back there before the next one.

    Args:
        parameters: Those that DDP reduces.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._gradients: list[Tensor] = []
        self._places: list[int] = []
        self._views: list[Tensor] = []

    def note(self) -> None:
        """Call it when a backward has ended, before user code sees its gradients."""
        found = [parameter.grad for parameter in self._parameters]
        self._gradients = [gradient for gradient in found if gradient is not None and not gradient.is_sparse]
        places = [gradient.data_ptr() for gradient in self._gradients]
        if places != self._places:
            self._places, self._views = places, [gradient.detach() for gradient in self._gradients]

    @torch.no_grad()
    def put_back(self) -> None:
        """Call it before a backward: gradients that have other memory by now are copied into that of before."""
        for gradient, place, view in zip(self._gradients, self._places, self._views, strict=True):
            if gradient.data_ptr() != place:
                view.copy_(gradient)
                gradient.data = view

"""Rows that ranks gather, made as many on all of them."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_parallel.errors import ConfigurationError, line_of_user
from lightning_parallel.ranks.collectives import stacked
from lightning_parallel.ranks.host_reads import at

_MOST_DIMENSIONS = 15


def as_many_rows(own: Tensor, group: ProcessGroup, device: torch.device) -> Tensor:
    """`own` with its first rows once more where other ranks have more, and a warning. A collective.

    Evaluation reads each sample once, so that the last batches of ranks may differ by a sample. A gather needs equal
    shapes, as a sampler that repeats samples gives them.

    Args:
        own: `[rows, ...]`, this rank's.
        group: The ranks that gather.
        device: This rank's, for the collective.

    Raises:
        ConfigurationError: On all ranks, if shapes differ in more than the number of rows, or a rank has none.
    """
    if own.dim() > _MOST_DIMENSIONS:
        return own
    sizes = [own.dim(), *own.shape]
    padded = torch.tensor(sizes + [0] * (_MOST_DIMENSIONS + 1 - len(sizes)), device=device)
    shapes = [row[1 : 1 + row[0]] for row in stacked(padded, group).tolist()]
    if all(shape == shapes[0] for shape in shapes):
        return own
    other = next(rank for rank, shape in enumerate(shapes) if shape != shapes[0])
    words = _SHAPES.format(at=at(line_of_user()), first=shapes[0], other=other, shape=shapes[other])
    rows = {shape[0] if shape and shape[1:] == shapes[0][1:] else 0 for shape in shapes}
    if 0 in rows:
        raise ConfigurationError([f"{words}. {_REFUSED}"])
    if group.rank() == 0:
        warnings.warn(f"{words}. {_REPEATED.format(most=max(rows))}", stacklevel=2)
    return own[torch.arange(max(rows), device=own.device) % len(own)]


_SHAPES = (
    "all_gather() {at}: of the ranks that read different samples, the first one gives {first} and rank {other} gives "
    "{shape}"
)
_REPEATED = (
    "The first rows of ranks that have fewer are repeated up to {most}, and count twice in what is computed from the "
    "result. Metrics of torchmetrics, and self.log(sync_dist=True), count each sample once"
)
_REFUSED = (
    "Only the number of rows may differ, and no rank may have none. Collect the values in a metric of torchmetrics, "
    "such as CatMetric, whose ranks may have different numbers"
)

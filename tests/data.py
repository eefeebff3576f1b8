"""Samples for the modules of `tests.models`: the same for every strategy and every number of ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from tests.models.cases import LENGTH, VOCABULARY

STEPS = 5
GLOBAL_BATCH = 8
IGNORED = -100
"""The label of a token that does not count."""


class Varying(Dataset[tuple[Tensor]]):
    """Token rows whose length changes from global batch to global batch."""

    def __init__(self, tokens: Tensor, global_batch: int) -> None:
        self.tokens, self.global_batch = tokens, global_batch

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[Tensor]:
        return (self.tokens[index][: LENGTH - 2 * (index // self.global_batch)],)


def data_of(case: str, num_samples: int, global_batch: int) -> Dataset[Any]:
    """Images, vectors or tokens, whatever the module of that name takes."""
    generator = torch.Generator().manual_seed(7)
    if case in ("conv_net", "vit"):
        images = torch.randn(num_samples, 1, 8, 8, generator=generator)
        return TensorDataset(images, torch.randint(0, 10, (num_samples,), generator=generator))
    if case == "gan":
        real = torch.randn(num_samples, 8, generator=generator) + 2
        return TensorDataset(torch.randn(num_samples, 4, generator=generator), real)
    if case == "other_method":
        return TensorDataset(torch.randn(num_samples, 5, 8, generator=generator))
    tokens = torch.randint(0, VOCABULARY, (num_samples, LENGTH), generator=generator)
    return Varying(tokens, global_batch) if case == "varying_length" else TensorDataset(tokens)


def loader_of(case: str, *, steps: int, global_batch: int, num_ranks: int) -> DataLoader[Any]:
    """`steps` batches of ``global_batch / num_ranks`` samples for each rank; Lightning deals the samples out."""
    data = data_of(case, steps * global_batch, global_batch)
    return DataLoader(data, batch_size=global_batch // num_ranks, shuffle=False)


def loader(num_ranks: int, steps: int = 4, case: str = "byte_gpt") -> DataLoader[Any]:
    """Batches for ranks that read different samples."""
    return loader_of(case, steps=steps, global_batch=GLOBAL_BATCH, num_ranks=num_ranks)


def batches(case: str, num_readers: int, steps: int = STEPS) -> DataLoader[Any]:
    """Batches where `num_readers` ranks, or groups of ranks, read different samples."""
    return loader(num_readers, steps, case)


def ragged(num_samples: int) -> TensorDataset:
    """Tokens and labels of very unequal length, one sample with no label at all."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, VOCABULARY, (num_samples, LENGTH), generator=generator)
    labels = tokens.roll(-1, 1)
    for index in range(num_samples):
        labels[index, [LENGTH - 1, 1, 9, 3, 0, 5, 2, 12][index % 8] :] = IGNORED
    return TensorDataset(tokens, labels)

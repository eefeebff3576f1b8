"""Fits that are saved in the middle of an epoch, and go on from there."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, WeightedRandomSampler

from lightning_parallel import full_state_dict
from tests.jobs.batch_samplers import Buckets
from tests.parity import trainer_for

NUM_SAMPLES = 24
GLOBAL_BATCH = 4


class Numbers(Dataset[Tensor]):
    """Samples that are their index, and note that they are loaded."""

    def __init__(self, length: int = NUM_SAMPLES) -> None:
        self.length, self.loaded = length, list[int]()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        self.loaded.append(index)
        return torch.tensor(float(index))


class Stream(IterableDataset[Tensor]):
    """The same without indices, in an order that is drawn when the first one is read."""

    def __iter__(self) -> Iterator[Tensor]:
        yield from torch.randperm(NUM_SAMPLES).float()


class Sized(Stream):
    """The same with a length, so that nothing is read ahead."""

    def __len__(self) -> int:
        return NUM_SAMPLES


class Noisy(Numbers):
    """Half of the samples, drawn as they are read, have another sign."""

    def __getitem__(self, index: int) -> Tensor:
        return super().__getitem__(index) * (1 if torch.rand(()) < 0.5 else -1)


class Stateful:
    """A loader with the protocol of torchdata's StatefulDataLoader."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.samples, self.position, self.restored = range(rank, NUM_SAMPLES, num_ranks), 0, False

    def __len__(self) -> int:
        return len(self.samples) // 2

    def __iter__(self) -> Iterator[Tensor]:
        if not self.restored:
            self.position = 0
        self.restored = False
        while self.position < len(self.samples):
            self.position += 2
            yield torch.tensor(self.samples[self.position - 2 : self.position], dtype=torch.float32)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "first": self.samples[0]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["first"] == self.samples[0]
        self.position, self.restored = state["position"], True


class Passes(DataLoader[Tensor]):
    """A loader of torch with a state of its own: an order for each pass, counted as the pass begins."""

    num_passes = 0

    def __iter__(self) -> Any:
        self.num_passes += 1
        order = torch.randperm(NUM_SAMPLES, generator=torch.Generator().manual_seed(self.num_passes))
        torch.empty((), dtype=torch.int64).random_()  # as torch does for the seeds of workers
        return iter([part.float() for part in order.split(self.batch_size or 1)])

    def state_dict(self) -> dict[str, Any]:
        return {"num_passes": self.num_passes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_passes = state["num_passes"]


class Layer(nn.Module):
    """One of a stack."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, values: Tensor) -> Tensor:
        return values + self.linear(values).tanh()


class Reads(L.LightningModule):
    """Notes epoch, index and samples of each batch, and a number that a hook draws."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Layer() for _ in range(4)))
        self.seen: list[tuple[int, int, list[int]]] = []
        self.drawn: list[float] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        parts = batch if isinstance(batch, list) else [batch]
        samples = [-1 if part is None else int(each) for part in parts for each in ([-1] if part is None else part)]
        self.seen.append((self.current_epoch, batch_idx, samples))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        numbers = torch.cat([part for part in (batch if isinstance(batch, list) else [batch]) if part is not None])
        loss: Tensor = self.layers(torch.stack([numbers / NUM_SAMPLES, numbers.sin()] * 2, -1)).square().mean()
        return loss

    def on_before_backward(self, loss: Tensor) -> None:
        self.drawn.append(float(torch.rand(())))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class SaveAt(Callback):
    """Saves behind a batch, counted over epochs."""

    def __init__(self, path: str, batch: int) -> None:
        self.path, self.batch, self.count = path, batch, 0

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.count += 1
        if self.count == self.batch:
            trainer.save_checkpoint(self.path)


def loaders(kind: str, readers: int, rank: int, size: int) -> Any:
    """Loaders of each kind, for `readers` ranks that read different samples."""
    if kind == "stateful":
        return Stateful(rank, readers)
    if kind.startswith("torchdata"):
        from torchdata.stateful_dataloader import StatefulDataLoader

        workers = 2 if "workers" in kind else 0
        return StatefulDataLoader(Numbers(), size, shuffle="shuffled" in kind, num_workers=workers)
    if kind in ("stream", "sized"):
        return DataLoader(Stream() if kind == "stream" else Sized(), batch_size=size)
    if kind == "passes":
        return Passes(Numbers(), batch_size=size)
    if kind.startswith("noisy"):
        return DataLoader(Noisy(), size, shuffle=True, num_workers=2 if "workers" in kind else 0)
    data = Numbers(23 if kind == "uneven" else NUM_SAMPLES)
    if kind in ("two", "cycle", "longest"):
        mode: Any = {"two": "min_size", "cycle": "max_size_cycle", "longest": "max_size"}[kind]
        return CombinedLoader([DataLoader(data, size, shuffle=True), DataLoader(Numbers(12), size, shuffle=True)], mode)
    options: dict[str, Any] = {
        "sequential": {"batch_size": size},
        "batches": {"batch_sampler": BatchSampler(RandomSampler(data), size, drop_last=True)},
        "buckets": {"batch_sampler": Buckets(NUM_SAMPLES)},
        "weighted": {"batch_size": size, "sampler": WeightedRandomSampler(range(1, 1 + len(data)), len(data))},
        "single": {"batch_size": None, "shuffle": True, "collate_fn": lambda value: value[None]},
        "workers": {"batch_size": size, "shuffle": True, "num_workers": 2},
        "persistent": {"batch_size": size, "shuffle": True, "num_workers": 2, "persistent_workers": True},
    }
    return DataLoader(data, **options.get(kind, {"batch_size": size, "shuffle": True}))


def fit(
    strategy: str,
    readers: int,
    path: str,
    *,
    kind: str = "shuffled",
    save: int = 0,
    from_path: str = "",
    size: int = 0,
    **kwargs: Any,
) -> dict[str, Any]:
    """Two epochs, saved in `path` behind a batch; or the rest of them, beginning with other numbers."""
    L.seed_everything(11 if from_path else 3, verbose=False)
    module = Reads()
    is_shared = torch.distributed.is_initialized() and readers > 1
    num_ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    kwargs = {"max_epochs": 2, "callbacks": [SaveAt(path, save)], **kwargs}
    given = loaders(kind, readers, torch.distributed.get_rank() if is_shared else 0, size or GLOBAL_BATCH // readers)
    trainer = trainer_for(strategy, num_ranks, **kwargs)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer.fit(module, given, ckpt_path=from_path or None)
    told = [str(each.message) for each in said if "begins anew" in str(each.message) or "resuming" in str(each.message)]
    data = getattr(given, "dataset", None)
    return {
        "seen": module.seen,
        "drawn": module.drawn,
        "weights": full_state_dict(trainer),
        "told": told,
        "step": trainer.global_step,
        "loaded": getattr(data, "loaded", []),
    }

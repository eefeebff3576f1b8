"""Copies to an accelerator that is made up: on a stream of their own, which the training waits for."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_parallel.callbacks import DevicePrefetch, device_prefetch
from lightning_parallel.callbacks.device_copies import DeviceCopies, copies_aside
from tests.jobs.prefetched import Draws, Numbers
from tests.parity import trainer_for

Pair = collections.namedtuple("Pair", ["first", "second"])


class Stream:
    """Notes what happens in it."""

    def __init__(self, did: list[Any], name: str) -> None:
        self.did, self.name = did, name

    def __enter__(self) -> None:
        self.did.append(f"enter {self.name}")

    def __exit__(self, *args: Any) -> None:
        self.did.append(f"leave {self.name}")

    def record_event(self) -> str:
        self.did.append(f"event of {self.name}")
        return "event"

    def wait_event(self, event: str) -> None:
        self.did.append(f"{self.name} waits for {event}")


@pytest.fixture
def did(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What streams and tensors have done, in order."""
    found: list[Any] = []
    training = Stream(found, "training")
    monkeypatch.setattr(torch, "Stream", lambda device: Stream(found, "copies"))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: training)

    def pin_memory(tensor: Tensor) -> Tensor:
        found.append("pin")
        return tensor.clone()

    monkeypatch.setattr(Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: found.append(f"kept for {stream.name}"))
    return found


def test_copies_run_beside_the_training(did: list[Any]) -> None:
    other = object()
    batch = {"a": torch.ones(2), "b": [torch.ones(3), "text", 3], "c": Pair(torch.ones(4), None), "d": (other,)}
    take = DeviceCopies(torch.device("meta")).begin(batch)
    assert did == ["enter copies", *["pin"] * 3, "event of copies", "leave copies"]
    did.clear()
    copied = take()
    assert did == ["training waits for event", *["kept for training"] * 3]
    tensors = [copied["a"], copied["b"][0], copied["c"].first]
    assert [(each.device.type, len(each)) for each in tensors] == [("meta", 2), ("meta", 3), ("meta", 4)]
    assert copied["b"][1:] == ["text", 3]
    assert type(copied["c"]) is Pair
    assert copied["d"][0] is other
    assert [copies_aside(torch.device(kind)) for kind in ("cuda", "cpu", "mps")] == [True, False, False]


class Copies:
    """Stands in for `DeviceCopies`, and marks what it has copied."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def context(self) -> Any:
        return contextlib.nullcontext()

    def begin(self, batches: list[Tensor]) -> Callable[[], Any]:
        return lambda: [batch.double() for batch in batches]


class Moved(Draws):
    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        self.seen.append(batch.dtype)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(batch.float(), batch_idx)

    def on_train_batch_end(self, *args: Any) -> None:
        """Draw nothing."""


class LooksBefore(Moved):
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch


@pytest.mark.parametrize(("make", "is_copied"), [(Moved, True), (LooksBefore, False)])
def test_hooks_that_see_batches_on_the_host(monkeypatch: pytest.MonkeyPatch, make: Any, is_copied: bool) -> None:
    monkeypatch.setattr(device_prefetch, "copies_aside", lambda device: True)
    monkeypatch.setattr(device_prefetch, "DeviceCopies", Copies)
    module = make()
    trainer_for("auto", 1, callbacks=[DevicePrefetch()]).fit(module, DataLoader(Numbers(), batch_size=4))
    dtypes = [each for each in module.seen if isinstance(each, torch.dtype)]
    assert dtypes[:3] == [torch.float32] * 3  # those that the main thread has read
    assert set(dtypes[3:]) == {torch.float64 if is_copied else torch.float32}

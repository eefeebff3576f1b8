"""Construction of modules on the host, whatever the device."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins import HalfPrecision
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import nn

from lightning_parallel import MeshStrategy


class Module(L.LightningModule):
    def configure_model(self) -> None:
        self.layer = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.device_of_build = torch.empty(0).device


def strategy_on(device: str, **kwargs: Any) -> MeshStrategy:
    strategy = MeshStrategy()
    strategy.parallel_devices = [torch.device(device, 0)]
    strategy.cluster_environment = LightningEnvironment()
    for name, value in kwargs.items():
        setattr(strategy, name, value)
    return strategy


@pytest.mark.parametrize("device", ["cuda", "xla"])
def test_no_module_is_built_whole_on_an_accelerator(device: str) -> None:
    """Lightning calls `configure_model` in this context, which would make tensors on the rank's device."""
    strategy, module = strategy_on(device), Module()
    deferral = strategy._deferral
    deferral.attach(module, to_meta=True)
    with strategy.tensor_init_context():
        assert torch.get_default_device() == torch.device("cpu")
        module.configure_model()
    assert deferral.record is not None
    assert deferral.record.accelerators == set()
    assert module.layer.weight.is_meta
    assert module.device_of_build == torch.device("cpu")
    deferral.detach()


def test_dtype_and_empty_values_are_lightnings() -> None:
    strategy = strategy_on("cuda", precision_plugin=HalfPrecision("bf16-true"))
    with strategy.tensor_init_context(empty_init=True):
        values = nn.init.constant_(torch.zeros(2), 1.0)
    assert values.dtype == torch.bfloat16
    assert values.tolist() == [0.0, 0.0]
    assert torch.get_default_device() == torch.device("cpu")
    assert torch.get_default_dtype() == torch.float32

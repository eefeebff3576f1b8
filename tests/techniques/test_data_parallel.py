"""One process over several devices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_parallel.techniques.data_parallel import ReplicatedSteps, merge_results, num_samples
from tests.models.cases import CASES


class TwoReplicas(ReplicatedSteps):
    """Two simulated replicas on the host, where torch has only one device."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module, [0, 1])

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        scattered = [self._share(inputs, index) for index in range(2)]
        replicas = [self._replica(self.module) for _ in scattered]
        outputs = [replica(*share, **kwargs) for replica, share in zip(replicas, scattered, strict=True)]
        return self.gather(outputs, "cpu")

    @staticmethod
    def _share(inputs: Any, index: int) -> Any:
        return torch.utils._pytree.tree_map_only(Tensor, lambda t: t.tensor_split(2)[index], inputs)

    def _replica(self, module: nn.Module) -> nn.Module:
        replica = module._replicate_for_data_parallel()
        replica._modules = {name: self._replica(child) for name, child in module._modules.items()}
        for name, child in replica._modules.items():
            setattr(replica, name, child)
        for name, parameter in module._parameters.items():
            replica.__dict__[name] = parameter
        return replica


class Logged(CASES["conv_net"]):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.logged: list[Any] = []

    def log(self, name: str, value: Any, **kwargs: Any) -> None:
        self.logged.append((name, float(value)))


def test_two_replicas_are_one_large_batch() -> None:
    module = Logged().eval()
    images, labels = torch.randn(5, 1, 8, 8), torch.arange(5)
    ours = TwoReplicas(module)("training_step", [images, labels], 0)
    expected = module.loss(images, labels)
    assert torch.allclose(ours, expected)
    ours.backward()
    gradients = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    expected.backward()
    assert all(torch.allclose(a, p.grad, atol=1e-6) for a, p in zip(gradients, module.parameters(), strict=True))
    assert module.logged == [("train_loss", pytest.approx(float(expected.detach())))]


def test_results_of_replicas() -> None:
    host = torch.device("cpu")
    first = {"loss": torch.tensor(1.0), "y": torch.ones(3)}
    second = {"loss": torch.tensor(4.0), "y": torch.zeros(1)}
    merged = merge_results([first, second], [3, 1], host)
    assert merged["loss"] == 1.75
    assert merged["y"].tolist() == [1, 1, 1, 0]
    assert merge_results([None, None], [1, 1], host) is None
    assert num_samples({"a": 1, "b": torch.zeros(7, 2)}) == 7
    assert num_samples("nothing") == 1

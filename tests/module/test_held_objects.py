"""Objects and generators that modules hold are put back as they were."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from lightning_parallel.module.held_objects import HeldObjects, stateful_objects


class Plain:
    def __init__(self) -> None:
        self.value, self.seen, self.mean = 1.0, [1], torch.zeros(2)


def test_objects_are_put_back() -> None:
    module = nn.Module()
    module.own, module.several, module.named = Plain(), [Plain()], {"a": Plain()}  # type: ignore[assignment]
    held = HeldObjects(module.modules())
    objects: list[Any] = [module.own, module.several[0], module.named["a"]]  # type: ignore[index]
    for each in objects:
        each.value, each.new = 2.0, 3
        each.seen.append(2)
        each.mean += 1
    held.restore()
    for each in objects:
        assert (each.value, each.seen, each.mean.tolist()) == (1.0, [1], [0, 0])
        assert not hasattr(each, "new")
    assert not held.has_drawn


def test_objects_in_objects() -> None:
    module = nn.Module()
    outer = Plain()
    outer.inner = {"a.b": [Plain()]}  # type: ignore[attr-defined]
    outer.back = outer  # type: ignore[attr-defined]
    module.own = outer  # type: ignore[assignment]
    inner = outer.inner["a.b"][0]  # type: ignore[attr-defined]
    held = HeldObjects([module])
    assert stateful_objects({"": module}) == {"own": outer, "own.inner['a.b'][0]": inner}
    inner.value = 2.0
    inner.seen.append(2)
    held.restore()
    assert (inner.value, inner.seen) == (1.0, [1])


def test_data_is_left_alone() -> None:
    """A copy of it for each microbatch would cost more than the step."""

    class Data(TensorDataset):
        """A user's dataset, derived from torch's."""

    module = nn.Module()
    module.data, module.own = Data(torch.zeros(3)), Plain()  # type: ignore[assignment]
    module.own.mean, module.own.seen = torch.zeros(1 << 17), [0] * (1 << 17)  # type: ignore[union-attr]
    held = HeldObjects([module])
    module.data.tensors = ()  # type: ignore[union-attr]
    module.own.mean += 1  # type: ignore[union-attr]
    module.own.seen[0] = module.own.value = 2  # type: ignore[union-attr]
    held.restore()
    assert module.data.tensors == ()  # type: ignore[union-attr]
    assert (module.own.value, module.own.seen[0], float(module.own.mean[0])) == (1.0, 2, 1.0)  # type: ignore[union-attr]


GENERATORS: dict[str, tuple[Any, Any]] = {
    "numpy": (np.random.default_rng(0), lambda generator: generator.random()),
    "numpy's old one": (np.random.RandomState(0), lambda generator: generator.rand()),
    "random": (random.Random(0), lambda generator: generator.random()),
    "torch": (torch.Generator(), lambda generator: float(torch.rand((), generator=generator))),
}


@pytest.mark.parametrize("kind", GENERATORS)
def test_generators_are_put_back(kind: str) -> None:
    module = nn.Module()
    module.generator, draw = GENERATORS[kind]  # type: ignore[assignment]
    held = HeldObjects([module])
    assert not held.has_drawn
    first = draw(module.generator)
    assert held.has_drawn
    held.restore()
    assert draw(module.generator) == first

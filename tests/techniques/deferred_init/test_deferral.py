"""Deferred initialisation: bit for bit an eager build, or an eager build."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_parallel.techniques.deferred_init.deferral import Deferral, unrecorded_meta_tensors
from tests.models.cases import GPT

HOST = torch.device("cpu")


def module_with(build: Callable[[Any], None]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        module = nn.Module()
        build(module)
        return module

    return make


def orthogonal(m: Any) -> None:
    m.a = nn.Linear(8, 6)
    nn.init.orthogonal_(m.a.weight)


def truncated(m: Any) -> None:
    m.a = nn.Linear(8, 6)
    nn.init.trunc_normal_(m.a.weight, std=0.02)


def in_strokes(m: Any) -> None:
    m.a = nn.Linear(8, 6)
    with torch.no_grad():
        m.a.weight[0].mul_(2)
        m.a.weight.data.normal_(0, 3**-0.5)
        m.a.bias[1:3] = 5.0
    m.p = nn.Parameter(torch.randn(3) * 0.1)
    m.q = nn.Parameter(torch.tensor([1.0, 2.0]))


def tied(m: Any) -> None:
    m.a, m.b = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
    m.b.weight = m.a.weight


def buffers(m: Any) -> None:
    m.register_buffer("mask", torch.tril(torch.ones(4, 4)).bool(), persistent=False)
    m.register_buffer("noise", torch.rand(4))
    m.order = torch.randperm(5)
    m.bn = nn.BatchNorm2d(3)
    m.rates = [rate.item() for rate in torch.linspace(0, 0.1, 4)]
    m.more = torch.arange(3).tolist()


def recurrent(m: Any) -> None:
    m.a = nn.LSTM(3, 4, 2)
    nn.init.constant_(m.a.bias_hh_l0, 1.0)


def copied_layers(m: Any) -> None:
    m.a = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2, enable_nested_tensor=False)
    m.b = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
    m.c = nn.Embedding(5, 4, padding_idx=1)


def other_dtype(m: Any) -> None:
    torch.set_default_dtype(torch.bfloat16)
    m.a = nn.Linear(4, 4)
    m.p = nn.Parameter(torch.randn(3))
    torch.set_default_dtype(torch.float32)
    m.b = nn.Linear(4, 4).to(torch.float64)


def asks_for_meta(m: Any) -> None:
    with torch.device("meta"):
        m.a = GPT()
        m.b = nn.Parameter(torch.randn(4, device="meta"))


def hugging_face(m: Any) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    m.a = LlamaForCausalLM(config)


def seeds_itself(m: Any) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        m.a = nn.Parameter(torch.randn(3))


def depends_on_chance(m: Any) -> None:
    m.a = nn.Linear(3, int(torch.randint(1, 9, ()).item()))
    m.b = nn.Parameter(torch.full((2,), random.random()))


def hides_tensors(m: Any) -> None:
    m.a = nn.Linear(3, 3)
    m.tables = [torch.rand(2), torch.rand(2)]


def has_own_generator(m: Any) -> None:
    m.a = nn.Parameter(torch.randn(3, generator=torch.Generator().manual_seed(1)))


DEFERRED = (orthogonal, truncated, in_strokes, tied, buffers, recurrent, copied_layers, other_dtype, hugging_face)
EAGER = (seeds_itself, depends_on_chance, hides_tensors, has_own_generator)


class Holder(nn.Module):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.make = make

    def configure_model(self) -> None:
        self.inner = self.make()


def built_deferred(build: Callable[[Any], None], *, to_meta: bool = True) -> tuple[Holder, bool, list[str], Tensor]:
    """The module, whether it was deferred, what was said, and the random state afterwards."""
    torch.manual_seed(3)
    random.seed(3)
    said: list[str] = []
    holder = Holder(module_with(build))
    deferral = Deferral(tell=said.append)
    deferral.attach(holder, to_meta=to_meta)
    holder.configure_model()
    record = deferral.record
    if record is not None:
        assert any(tensor.is_meta for tensor in holder.parameters())
        assert unrecorded_meta_tensors(holder, record) == []
        record.materialize(holder, HOST)
    deferral.detach()
    assert "configure_model" not in vars(holder)
    return holder, record is not None, said, torch.get_rng_state()


def assert_equal_to_eager(build: Callable[[Any], None], holder: Holder, state: Tensor) -> None:
    torch.manual_seed(3)
    random.seed(3)
    eager = module_with(build)()
    assert torch.equal(state, torch.get_rng_state())
    ours, theirs = holder.inner.state_dict(), eager.state_dict()
    assert list(ours) == list(theirs)
    for name in theirs:
        assert ours[name].dtype == theirs[name].dtype
        assert torch.equal(ours[name], theirs[name]), name
    for (name, a), b in zip(holder.inner.named_buffers(), eager.buffers(), strict=True):
        assert torch.equal(a, b), name
    assert len(list(holder.inner.parameters())) == len(list(eager.parameters()))


@pytest.mark.parametrize("build", DEFERRED)
def test_deferred_builds_equal_eager_ones(build: Callable[[Any], None]) -> None:
    holder, deferred, said, state = built_deferred(build)
    assert deferred, said
    assert said == []
    assert_equal_to_eager(build, holder, state)


@pytest.mark.parametrize("build", EAGER)
def test_what_cannot_be_recorded_is_built_eagerly(build: Callable[[Any], None]) -> None:
    holder, deferred, said, state = built_deferred(build)
    assert not deferred
    assert "configure_model is not deferred" in said[0]
    assert_equal_to_eager(build, holder, state)


@pytest.mark.parametrize("to_meta", [True, False])
def test_a_module_that_asks_for_meta(to_meta: bool) -> None:
    """It has values in the end, those of the same module built on the host."""
    holder, deferred, _, _ = built_deferred(asks_for_meta, to_meta=to_meta)
    assert deferred is to_meta
    torch.manual_seed(3)
    eager = GPT()
    assert all(torch.equal(a, b) for a, b in zip(holder.inner.a.parameters(), eager.parameters(), strict=True))


def test_a_users_error_is_the_users(tmp_path: Any) -> None:
    def broken(m: Any) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        built_deferred(broken)


def test_half_built_modules_start_again() -> None:
    """What an attempt left on the module is gone before the eager build begins."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.noted: list[int] = []

        def configure_model(self) -> None:
            assert not hasattr(self, "first")
            self.noted.append(1)
            self.register_forward_hook(lambda *_: None)
            self.first = nn.Linear(2, 2)
            self.second = nn.Parameter(torch.randn(2, generator=torch.Generator()))

    module = Counting()
    deferral = Deferral(tell=lambda text: None)
    deferral.attach(module, to_meta=True)
    module.configure_model()
    assert deferral.record is None
    assert not module.first.weight.is_meta
    assert module.noted == [1]
    assert len(module._forward_hooks) == 1


def test_little_more_than_one_tensor_is_whole_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dead values are not kept: each layer is filled twice, and only the last filling is needed."""
    from lightning_parallel.techniques.deferred_init import replay as init_replay

    class Model(nn.Module):
        def configure_model(self) -> None:
            self.layers = nn.ModuleList(nn.Linear(100, 100, bias=False) for _ in range(10))
            for layer in self.layers:
                nn.init.normal_(layer.weight)

    alive: list[int] = []
    run = init_replay.Memory.run

    def watched(self: Any, operation: Any) -> None:
        run(self, operation)
        alive.append(sum(len(storage) for storage in self._real.values()))

    monkeypatch.setattr(init_replay.Memory, "run", watched)
    module = Model()
    deferral = Deferral(tell=print)
    deferral.attach(module, to_meta=True)
    module.configure_model()
    assert deferral.record is not None
    deferral.record.materialize(module, HOST)
    assert max(alive) == 100 * 100 * 4


def test_tensors_on_meta_that_nobody_recorded_are_named() -> None:
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    names = unrecorded_meta_tensors(module, None)
    assert names[:2] == ["0.weight", "0.bias"]
    assert "1.running_mean" in names


# On accelerators: torch knows the name of XLA, but has no kernels for it, so nothing can be made there ----------------


def on(device: str) -> Callable[[Any], None]:
    def build(m: Any) -> None:
        m.a = nn.Linear(8, 6, device=device)
        with torch.device(device):
            m.b = nn.Embedding(5, 4)
            m.register_buffer("angles", torch.arange(4).float().cos())
        m.c = nn.Parameter(torch.zeros_like(m.a.bias, device=device) + torch.randn(6, device=device))
        if device != "cpu":  # what `.to(device)` and `torch.tensor(values, device=device)` end in
            m.a.weight = nn.Parameter(torch.ops.aten._to_copy.default(m.a.weight, device=torch.device(device)))
            given = torch.ops.aten._to_copy.default(torch.ones(6, device="cpu"), device=torch.device(device))
            m.c.data.mul_(given)
        nn.init.trunc_normal_(m.a.weight)

    return build


@pytest.mark.parametrize("around", ["cpu", "xla"])
def test_construction_on_an_accelerator_is_recorded_on_the_host(around: str) -> None:
    with torch.device(around):
        holder, deferred, said, state = built_deferred(on("xla"))
    assert deferred, said
    assert len(said) == 1
    assert "makes tensors on xla" in said[0]
    assert_equal_to_eager(on("cpu"), holder, state)

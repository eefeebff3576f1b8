"""Techniques by themselves, below any strategy."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torchmetrics import MeanMetric

from lightning_parallel.module.hidden_states import take_hidden
from lightning_parallel.module.snapshot import Snapshot
from lightning_parallel.strategies.module_device import set_module_device
from lightning_parallel.techniques.clipping import clip_gradients_by_norm
from lightning_parallel.techniques.compression import register_comm_hook
from lightning_parallel.techniques.data_parallel import ReplicatedSteps, merge_results, num_samples
from lightning_parallel.techniques.optimizer_sharding import ShardedOptimizer, deal_out, optimizer_violations
from lightning_parallel.techniques.replicate import reduce_gradients, synchronize_module
from lightning_parallel.techniques.sharding import apply_sharding, keep_whole, plan_sharding, unreduced_parameters
from tests.collectives import collectives_of_a_window
from tests.models.cases import CASES, GPT

# Clipping ---------------------------------------------------------------------------------------------------------


def clip(norm_type: float, max_norm: float) -> float:
    """The largest difference to torch in one process, for sharded and whole parameters together."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model, reference = GPT(), GPT()
    reference.load_state_dict(model.state_dict())
    whole = {model.norm.weight, model.norm.bias}
    fully_shard(model, mesh=mesh, ignored_params=whole)
    generator = torch.Generator().manual_seed(1)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        theirs.grad = torch.randn(theirs.shape, generator=generator)
        ours.grad = theirs.grad.clone()
        if isinstance(ours, DTensor):
            ours.grad = distribute(theirs.grad, ours)
    parameters = [*model.parameters(), model.norm.weight]  # twice: counted once
    ours_norm = clip_gradients_by_norm(parameters, max_norm, norm_type)
    theirs_norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), max_norm, norm_type)
    differences = [float(abs(ours_norm - theirs_norm))]
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        gradient = ours.grad.full_tensor() if isinstance(ours.grad, DTensor) else ours.grad
        differences.append(float((gradient - theirs.grad).abs().max()))
    return max(differences)


def distribute(value: Tensor, like: DTensor) -> Tensor:
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
@pytest.mark.parametrize("max_norm", [0.1, 1e6])
@pytest.mark.parametrize("size", [2, 4])
def test_clipping_equals_torch(ranks: Any, size: int, norm_type: float, max_norm: float) -> None:
    tolerance = 1e-3 if norm_type == 1.0 else 1e-5  # the 1-norm of 11,152 elements is itself some 9,000
    assert max(ranks(size).run(clip, norm_type, max_norm)) < tolerance


def test_clipping_without_gradients() -> None:
    assert clip_gradients_by_norm([nn.Parameter(torch.ones(2))], 1.0) == 0


# Replication ------------------------------------------------------------------------------------------------------


def reduce_some() -> list[Any]:
    rank = dist.get_rank()
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    parameters[0].grad = torch.full((2,), float(rank + 1))
    if rank == 1:
        parameters[1].grad = torch.full((2,), 4.0)
    reduce_gradients(parameters, dist.group.WORLD)
    return [None if p.grad is None else p.grad.tolist() for p in parameters]


def test_gradients_are_averaged_also_where_a_rank_has_none(ranks: Any) -> None:
    assert ranks(2).run(reduce_some) == [[[1.5, 1.5], [2.0, 2.0], None]] * 2


def synchronized() -> list[list[float]]:
    torch.manual_seed(dist.get_rank())
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    module[1].running_mean.fill_(float(dist.get_rank()))
    synchronize_module(module, torch.device("cpu"))
    return [tensor.flatten().tolist() for tensor in module.state_dict().values()]


def test_all_ranks_start_from_rank_0(ranks: Any) -> None:
    first, second = ranks(2).run(synchronized)
    assert first == second


# Optimizer sharding -----------------------------------------------------------------------------------------------


def test_parameters_are_dealt_out_evenly() -> None:
    assert deal_out([4, 3, 3, 2], 2) == [0, 1, 1, 0]
    assert deal_out([], 2) == []
    assert sorted(deal_out([1] * 8, 4)) == [0, 0, 1, 1, 2, 2, 3, 3]


def zero1(name: str) -> dict[str, Any]:
    """Ours beside the same optimizer on one device, for optimizers with statistics of a whole matrix too."""
    torch.manual_seed(0)
    ours, theirs = GPT(), GPT()
    theirs.load_state_dict(ours.state_dict())
    make = {
        "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
        "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
        "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, eps=1e-4, foreach=True),
    }[name]
    optimizer, reference = make(ours.parameters()), make(theirs.parameters())
    sharded = ShardedOptimizer(optimizer)
    tokens = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(2))
    for step in range(3):
        for model, one in ((ours, optimizer), (theirs, reference)):
            one.zero_grad()
            model(tokens).pow(2).mean().backward()
            if step == 1:
                one.step(lambda: None)
            else:
                one.step()
    gradients = all(p.grad is not None for p in ours.parameters())
    held = sum(len(entries) > 0 for entries in optimizer.state.values())
    sharded.make_whole()
    whole = optimizer.state_dict()["state"]
    expected = reference.state_dict()["state"]
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    return {
        "difference": max(float((a - b).detach().abs().max()) for a, b in pairs),
        "gradients": gradients,
        "held": held,
        "all": len(expected),
        "state": list(whole) == list(expected)
        and all(torch.allclose(whole[i][k], expected[i][k], atol=1e-5) for i in expected for k in expected[i]),
        "hooks": len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks),
    }


@pytest.mark.parametrize("name", ["adamw", "adagrad", "adafactor"])
def test_zero1_equals_one_device(ranks: Any, name: str) -> None:
    found = ranks(2).run(zero1, name)
    assert all(one["difference"] < 1e-5 and one["gradients"] and one["state"] and one["hooks"] == 0 for one in found)
    assert sum(one["held"] for one in found) == found[0]["all"]
    assert all(0 < one["held"] < one["all"] for one in found)


def test_lbfgs_is_refused() -> None:
    assert "ddp_custom" in optimizer_violations(torch.optim.LBFGS([nn.Parameter(torch.zeros(1))]))[0]


# Compression ------------------------------------------------------------------------------------------------------


def compressed(hook: str) -> float:
    """The relative error of a DDP gradient after four steps of communication."""
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    reference = nn.Linear(64, 64)
    reference.load_state_dict(model.state_dict())
    ddp = nn.parallel.DistributedDataParallel(model)
    register_comm_hook(ddp, hook, powersgd_rank=None)
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    for _ in range(4):
        ddp.zero_grad()
        ddp(x[dist.get_rank() :: 2]).pow(2).mean().backward()
    reference(x).pow(2).mean().backward()
    error = (model.weight.grad - reference.weight.grad).norm() / reference.weight.grad.norm()
    return float(error)


@pytest.mark.parametrize(("hook", "least", "most"), [("none", 0, 1e-6), ("fp16", 1e-6, 1e-3), ("powersgd", 1e-3, 1)])
def test_comm_hooks_run_on_gloo(ranks: Any, hook: str, least: float, most: float) -> None:
    assert all(least <= error <= most for error in ranks(2).run(compressed, hook))


# Sharding ---------------------------------------------------------------------------------------------------------


def test_plan_under_automatic_optimization() -> None:
    module = CASES["bare_parameter"]()
    plan = plan_sharding(module, ("model.blocks.0", "model.blocks.1"), root_is_unit=True)
    assert plan.units == ("model.blocks.0", "model.blocks.1", "")
    assert plan.whole == {"temperature": "a scalar"}


def test_plan_under_manual_optimization() -> None:
    plan = plan_sharding(CASES["gan"](), (), root_is_unit=False)
    assert plan.units == ("discriminator", "generator")
    assert plan.whole == {"shift": "no unit holds it"}


def test_parameters_of_another_dtype_stay_whole() -> None:
    module = GPT()
    module.norm.to(torch.float64)
    plan = plan_sharding(module, (), root_is_unit=True)
    assert set(plan.whole) == {"norm.weight", "norm.bias"}


def test_the_audit_names_forgotten_parameters() -> None:
    module = CASES["byte_gpt"]()
    plan = plan_sharding(module, (), root_is_unit=True)
    forgotten = unreduced_parameters(module, plan, None)  # type: ignore[arg-type]
    assert forgotten == [name for name, _ in module.named_parameters()]


@pytest.mark.parametrize(
    ("strategy", "size", "gathers", "reduces", "all_reduces"),
    [
        # Three layers and the root: layers are gathered twice, the root is kept from forward to backward.
        # The all-reduce is that of a byte a parameter, by which ranks agree on what the step used.
        ("fsdp_custom", 2, 7, 4, 1),
        ("zero2_custom", 2, 4, 4, 1),
        ("hsdp_custom", 4, 7, 4, 4 + 1),
    ],
)
def test_collectives_of_a_step(
    ranks: Any, strategy: str, size: int, gathers: int, reduces: int, all_reduces: int
) -> None:
    counts = ranks(size).run(collectives_of_a_window, strategy)[0]
    assert counts.number("gather") == gathers, counts
    assert counts.number("reduce_scatter") == reduces, counts
    assert counts.number("all_reduce") == all_reduces, counts


# Without units ----------------------------------------------------------------------------------------------------


def test_parameters_and_buffers_go_to_the_device_without_units() -> None:
    module = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4))
    plan = keep_whole(module)
    assert plan.units == ()
    assert set(plan.whole) == {name for name, _ in module.named_parameters()}
    moved: list[Tensor] = []
    options: Any = {"reshard": "always", "policy": None, "offload": None, "device": torch.device("cpu")}
    with mock.patch.object(Tensor, "to", lambda self, device: moved.append(self) or self):
        apply_sharding(module, plan, Any, **options)
    assert len(moved) == 4 + 3


class Measured(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()


def test_a_module_knows_its_device() -> None:
    module = Measured()
    set_module_device(module, torch.device("meta"))
    assert module.device.type == module.mean.device.type == module.mean.mean_value.device.type == "meta"


def test_hidden_states_under_two_names() -> None:
    hidden = torch.zeros(2)
    assert take_hidden((), {"scale": 2, "x": hidden, "first": hidden}) == (hidden, (), {"scale": 2, "first": hidden})
    assert take_hidden((hidden, 3), {"first": hidden}) == (hidden, (3,), {"first": hidden})


# Footprint --------------------------------------------------------------------------------------------------------


def test_what_the_user_changed_meanwhile_stays() -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    weight = module[0].weight
    with Snapshot(module) as snapshot:
        module[0].weight = nn.Parameter(torch.ones(2, 2))
        module[0].ours = True
        handle = module[0].register_forward_hook(lambda *args: None)
    assert weight.numel() == 0
    module[0].theirs = True
    module[0].register_forward_hook(lambda *args: None)
    snapshot.restore(lambda tensor: tensor.detach().clone())
    assert module[0].weight is weight
    assert torch.equal(weight, torch.ones(2, 2))
    assert not hasattr(module[0], "ours")
    assert module[0].theirs
    assert len(module[0]._forward_hooks) == 1
    assert handle.id not in module[0]._forward_hooks


def test_memory_format_comes_back() -> None:
    convolution = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    weight = convolution.weight
    value, stride = weight.detach().clone(), weight.stride()
    with Snapshot(convolution) as snapshot:
        convolution.weight = nn.Parameter(weight.detach().contiguous())
    snapshot.restore(lambda tensor: tensor.detach().contiguous())
    assert weight.stride() == stride
    assert torch.equal(weight, value)


# DataParallel -----------------------------------------------------------------------------------------------------


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

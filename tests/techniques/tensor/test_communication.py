"""What ranks that share layers send each other, and what each of them holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from lightning_parallel import build_strategy
from tests.collectives import Collectives
from tests.data import batches
from tests.models.tables import TENSOR_MODULES
from tests.parity import make_trainer

KINDS = {"all_gather": "gather", "all_reduce": "all_reduce", "reduce_scatter": "reduce_scatter"}


class BetweenPeers(Collectives):
    """Of a step, what ranks send that share each layer, of their own accord or inside of an operation on DTensors."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # DTensors first: then what they send is seen here
        name = func.overloadpacket.__name__
        if func.namespace == "_c10d_functional" and (
            kind := next((kind for part, kind in KINDS.items() if part in name), "")
        ):
            self.counts[kind, torch.float32] += 1
        groups = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.ScriptObject)]
        sizes = {dist.ProcessGroup.unbox(group).size() for group in groups if "ProcessGroup" in str(group._type())}
        if func.namespace == "c10d" and 2 not in sizes:
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def by_kind(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for (kind, _), number in self.counts.items():
            found[kind] = found.get(kind, 0) + number
        return found


def sent(case: str) -> tuple[dict[str, int], dict[str, int]]:
    """What peers send in forward and in backward of the second step."""
    forward, backward = BetweenPeers(), BetweenPeers()

    class Module(TENSOR_MODULES[case]):  # type: ignore[misc]
        def loss(self, tokens: Tensor) -> Tensor:
            if self.global_step != 1:
                return super().loss(tokens)
            with forward:
                return super().loss(tokens)

        def on_before_backward(self, loss: Tensor) -> None:
            if self.global_step == 1:
                backward.__enter__()

        def on_after_backward(self) -> None:
            if self.global_step == 1:
                backward.__exit__(None, None, None)

    make_trainer(build_strategy("tp_custom"), 2).fit(Module(), batches(case, 1, 3))
    return forward.by_kind(), backward.by_kind()


# Of three slices of it: torch 2.11, and 2.14 again, add them up before they send them.
SENDS_SLICES = (2, 12) <= torch.__version__ < (2, 14)
GRADIENT_OF_GATHERED = {"all_reduce": 2 + 3} if SENDS_SLICES else {"reduce_scatter": 1}


@pytest.mark.parametrize(
    ("case", "layers", "forward", "backward"),
    [
        ("llama", 3, {"all_reduce": 2}, {"all_reduce": 2}),
        ("hard", 3, {"all_reduce": 2}, {"all_reduce": 2}),
        ("bert", 2, {"all_reduce": 2}, {"all_reduce": 2}),
        # The norms over a head of queries and of keys: each rank has the gradient of its heads.
        ("qwen3", 2, {"all_reduce": 2}, {"all_reduce": 2 + 2}),
        # The head of keys and that of values are whole, and each rank has the gradient of its queries.
        ("one_key_head", 3, {"all_reduce": 2}, {"all_reduce": 2 + 2}),
        # Parts of a map for queries, keys and values together are no heads: its result is gathered.
        ("byte_gpt", 3, {"all_reduce": 2, "gather": 1}, {"all_reduce": 2, **GRADIENT_OF_GATHERED}),
        # `nn.MultiheadAttention` packs its weights, and so its biases: each is gathered, and its gradient scattered.
        ("encoder", 3, {"all_reduce": 2, "gather": 2}, {"all_reduce": 2, "reduce_scatter": 2}),
    ],
)
def test_collectives_of_a_layer(
    ranks: Any, case: str, layers: int, forward: dict[str, int], backward: dict[str, int]
) -> None:
    """Nothing but these goes on between the ranks that share a layer."""
    for found in ranks(2).run(sent, case):
        assert found == tuple({kind: layers * n for kind, n in each.items()} for each in (forward, backward))


class Held(Callback):
    """How much of each split parameter and of its optimizer state this rank holds."""

    def __init__(self) -> None:
        self.shares: dict[str, float] = {}
        self.states: dict[str, float] = {}

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        state = trainer.optimizers[0].state
        for name, parameter in module.named_parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            self.shares[name] = local.numel() / parameter.numel()
            average = state[parameter]["exp_avg"]
            average = average.to_local() if isinstance(average, DTensor) else average
            self.states[name] = average.numel() / parameter.numel()


def held(case: str, strategy: str, num_ranks: int, num_readers: int) -> Held:
    callback = Held()
    trainer = make_trainer(build_strategy(strategy), num_ranks, callbacks=[callback])
    trainer.fit(TENSOR_MODULES[case]("adamw"), batches(case, num_readers, 1))
    return callback


@pytest.mark.parametrize(("strategy", "size", "maps"), [("tp_custom", 4, 4), ("fsdp_custom:tensor=2", 4, 4)])
def test_a_rank_holds_its_share(ranks: Any, strategy: str, size: int, maps: int) -> None:
    readers = 1 if strategy == "tp_custom" else 2
    for found in ranks(size).run(held, "hard", strategy, size, readers):
        for name, share in found.shares.items():
            leaf = name.split(".")[-2]
            is_map = leaf in ("q", "k", "v", "o", "up", "down")
            is_split = is_map and not (leaf in ("o", "down") and name.endswith("bias"))
            whole = 1.0 if strategy == "tp_custom" else 1 / readers
            assert share == pytest.approx(1 / maps if is_split else whole), name
            assert found.states[name] == share, name


def test_heads_of_attention_modules_are_shared(ranks: Any) -> None:
    for found in ranks(2).run(held, "encoder", "tp_custom", 2, 1):
        shares = {name.split("layers.0.")[1]: share for name, share in found.shares.items() if "layers.0." in name}
        split = [name for name, share in shares.items() if share == 0.5]
        assert split == [
            "self_attn.in_proj_weight", "self_attn.in_proj_bias", "self_attn.out_proj.weight", "linear1.weight",
            "linear1.bias", "linear2.weight",
        ]  # fmt: skip

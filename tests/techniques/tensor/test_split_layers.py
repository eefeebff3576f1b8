"""Tensor parallel: linear maps and heads split over ranks, and numbers equal to those of one process."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from lightning_parallel import ConfigurationError, build_strategy, full_state_dict
from tests.collectives import Collectives
from tests.data import STEPS, batches
from tests.jobs.lifecycle import marks
from tests.jobs.sharing import counted, lifecycle
from tests.models.cases import CASES, next_token_loss
from tests.models.hugging_face import Llama
from tests.models.layered import DropoutBlock, Hard
from tests.models.tables import TENSOR_MODULES
from tests.parity import TOLERANCE, Recorder, assert_same_training, difference, make_trainer, reference, train, worst

KINDS = {"all_gather": "gather", "all_reduce": "all_reduce", "reduce_scatter": "reduce_scatter"}


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("case", TENSOR_MODULES)
def test_two_ranks_share_each_layer(ranks: Any, case: str, optimizer: str) -> None:
    assert_same_training(
        ranks(2).run(train, case, optimizer, "tp_custom", 2, 1, norms=True)[0], reference(case, optimizer, norms=True)
    )


@pytest.mark.parametrize("case", ["llama", "one_key_head", "hard", "t5", "vit", "padded_encoder", "qwen3"])
def test_four_ranks_share_each_layer(ranks: Any, case: str) -> None:
    """Llama has two heads of keys and values, which stay whole."""
    assert_same_training(
        ranks(4).run(train, case, "adamw", "tp_custom", 4, 1, norms=True)[0], reference(case, norms=True)
    )


PRODUCTS = [
    ("fsdp_tp_custom", 2),
    ("hsdp_custom:replicate=2,tensor=2", 2),
    ("fsdp_custom:tensor=2,context=2", 1),
    ("zero2_custom:tensor=2", 2),
    ("fsdp_offload_custom:tensor=2", 2),
]


@pytest.mark.parametrize(("strategy", "readers"), PRODUCTS)
@pytest.mark.parametrize("case", ["llama", "hard", "demo", "hf_gpt2", "configure_model"])
def test_products(ranks: Any, case: str, strategy: str, readers: int) -> None:
    if strategy.startswith(("zero2", "fsdp_offload")) and case not in ("hard", "configure_model"):
        pytest.skip("one module with each way to build it is enough for these")
    if "context" in strategy and case not in ("llama", "hard", "demo"):
        pytest.skip("it has two heads")
    assert_same_training(
        ranks(4).run(train, case, "adamw", strategy, 4, readers, norms=True)[0], reference(case, norms=True)
    )


@pytest.mark.parametrize(
    "policies",
    ["recompute=full", "recompute=selective", "compile=layers", "recompute=full,compile=layers", "offload=optimizer"],
)
@pytest.mark.parametrize("case", ["llama", "byte_gpt"])
def test_layer_policies(ranks: Any, case: str, policies: str) -> None:
    if case == "byte_gpt" and "compile" in policies:
        pytest.skip("DTensors run through its layers, which takes the compiler a minute: see the matrix of policies")
    found = ranks(4).run(train, case, "adamw", f"fsdp_tp_custom:{policies}", 4, 2, norms=True)[0]
    assert_same_training(found, reference(case, norms=True))


@pytest.mark.parametrize("sync", ["last", "every"])
@pytest.mark.parametrize("strategy", ["fsdp_tp_custom", "hsdp_custom:replicate=2,tensor=2"])
def test_accumulation(ranks: Any, strategy: str, sync: str) -> None:
    text = f"{strategy}{',' if ':' in strategy else ':'}accumulation_sync={sync}"
    ours = ranks(4).run(train, "hard", "adamw", text, 4, 2, accumulate_grad_batches=2, norms=True)[0]
    theirs = reference("hard", "adamw", accumulate_grad_batches=2, norms=True)
    assert worst(ours, theirs) < TOLERANCE
    assert ours.norms == pytest.approx(theirs.norms, abs=TOLERANCE)


@pytest.mark.parametrize("case", ["llama", "hard", "encoder", "hf_gpt2"])
def test_mixed_precision(ranks: Any, case: str) -> None:
    """bfloat16 has 8 bits of mantissa."""
    ours = ranks(4).run(train, case, "adamw", "fsdp_tp_custom", 4, 2, precision="bf16-mixed", norms=True)[0]
    theirs = reference(case, precision="bf16-mixed", norms=True)
    assert ours.losses == pytest.approx(theirs.losses, abs=2e-2)


@pytest.mark.parametrize(("threshold", "algorithm"), [(0.01, "norm"), (0.001, "value"), (None, "norm")])
def test_clipping(ranks: Any, threshold: float | None, algorithm: str) -> None:
    kwargs = {"gradient_clip_val": threshold, "gradient_clip_algorithm": algorithm}
    ours = ranks(4).run(train, "hard", "sgd", "fsdp_tp_custom", 4, 2, **kwargs, norms=True)[0]
    assert_same_training(ours, reference("hard", "sgd", **kwargs, norms=True))


# The user's own plan ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "plan",
    [
        "{up: colwise, down: rowwise}",
        "{q: colwise, k: colwise, v: colwise, o: rowwise}",
        "{blocks.*.up: colwise, blocks.*.down: rowwise, o: replicate}",
        "{blocks.0.up: colwise, blocks.0.down: rowwise}",
        "{down: rowwise}",
        "{up: colwise}",
        "{up: rowwise, down: colwise}",
        "{q: colwise, k: colwise, v: colwise}",
    ],
)
def test_own_plan(ranks: Any, plan: str) -> None:
    """Some of these split less than they could; their numbers are right."""
    ours = ranks(2).run(train, "hard", "adamw", f"tp_custom:tensor_plan={plan}", 2, 1, norms=True)[0]
    assert_same_training(ours, reference("hard", norms=True))


# What is sent, and what is held -------------------------------------------------------------------------------------


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


# Of three slices of it: torch 2.14 adds them up before it sends them.
GRADIENT_OF_GATHERED = {"reduce_scatter": 1} if torch.__version__ >= (2, 14) else {"all_reduce": 2 + 3}


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


# The lifecycle ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("strategy", "size", "readers"), [("tp_custom", 2, 1), ("fsdp_tp_custom", 4, 2)])
def test_every_entry_point(ranks: Any, strategy: str, size: int, readers: int) -> None:
    expected = lifecycle("auto", 1, 1)
    for index, ours in enumerate(ranks(size).run(lifecycle, strategy, size, readers)):
        for name in ("before", "test"):
            assert ours[name][0] == pytest.approx(expected[name][0], abs=TOLERANCE)
        if readers == 1:
            assert ours["during"] == pytest.approx(expected["during"], abs=TOLERANCE)
            assert torch.allclose(ours["predictions"], expected["predictions"], atol=TOLERANCE)
        assert ours["norms"] == pytest.approx(expected["norms"], abs=TOLERANCE), index
        assert ours["plain"]


def save(strategy: str, num_ranks: int, num_readers: int, path: str) -> dict[str, Tensor]:
    """Two epochs, with a checkpoint after the first."""
    L.seed_everything(3, verbose=False)

    class Save(Callback):
        def on_train_epoch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.current_epoch == 0:
                trainer.save_checkpoint(path)

    return _two_epochs(strategy, num_ranks, num_readers, callbacks=[Save()])


def resume(strategy: str, num_ranks: int, num_readers: int, path: str) -> dict[str, Tensor]:
    """The second epoch, from other weights."""
    L.seed_everything(11, verbose=False)
    return _two_epochs(strategy, num_ranks, num_readers, path)


def _two_epochs(strategy: str, num_ranks: int, readers: int, path: str | None = None, **kwargs: Any) -> Any:
    built = strategy if strategy == "auto" else build_strategy(strategy)
    trainer = make_trainer(built, num_ranks, max_epochs=2, gradient_clip_val=0.5, **kwargs)
    trainer.fit(CASES["parameter_groups"]("adamw"), batches("parameter_groups", readers, 3), ckpt_path=path)
    return full_state_dict(trainer)


def test_checkpoints_resume_under_other_names(ranks: Any, tmp_path: Path) -> None:
    uninterrupted = save("auto", 1, 1, str(tmp_path / "plain"))
    ours = ranks(2).run(save, "tp_custom", 2, 1, str(tmp_path / "tp"))[0]
    assert difference(ours, uninterrupted) < TOLERANCE
    assert difference(resume("auto", 1, 1, str(tmp_path / "tp")), uninterrupted) < TOLERANCE
    for name, size, readers, path in (
        ("tp_custom", 2, 1, "plain"),
        ("fsdp_custom", 2, 2, "tp"),
        ("tp_custom", 2, 1, "tp"),
        ("fsdp_tp_custom", 4, 2, "tp"),
    ):
        resumed = ranks(size).run(resume, name, size, readers, str(tmp_path / path))[0]
        assert difference(resumed, uninterrupted) < TOLERANCE, name


def plain_again(case: str) -> dict[str, Any]:
    """A module after fit, and after another under another strategy."""
    L.seed_everything(3, verbose=False)
    module, untouched = TENSOR_MODULES[case]("adamw"), TENSOR_MODULES[case]("adamw")
    objects = list(module.parameters())
    trainer = make_trainer(build_strategy("tp_custom"), 2)
    trainer.fit(module, batches(case, 1, 2))
    whole = full_state_dict(trainer)
    found = {
        "marks": [a for a, b in zip(marks(module), marks(untouched), strict=True) if a != b],
        "same objects": all(a is b for a, b in zip(module.parameters(), objects, strict=True)),
        "difference": difference(module.state_dict(), whole) if whole else 0.0,
        "loss": float(module.loss(next(iter(batches(case, 1)))[0]).detach()),
    }
    make_trainer(build_strategy("fsdp_custom"), 2).fit(module, batches(case, 2, 1))
    return found


@pytest.mark.parametrize("case", ["hard", "demo", "hf_gpt2", "encoder"])
def test_the_module_is_plain_again(ranks: Any, case: str) -> None:
    first, second = ranks(2).run(plain_again, case)
    for found in (first, second):
        assert found["marks"] == []
        assert found["same objects"]
        assert found["difference"] == 0.0
    assert first["loss"] == second["loss"]


@pytest.mark.parametrize(("strategy", "readers"), [("fsdp_tp_custom", 2), ("hsdp_custom:replicate=2,tensor=2", 2)])
def test_ranks_that_share_samples_count_once(ranks: Any, strategy: str, readers: int) -> None:
    assert ranks(4).run(counted, strategy, 4, readers) == [STEPS * 8] * 4


class WithDropout(Hard):
    """Notes what comes out of the last layer."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer, make=DropoutBlock)
        self.noted: list[Tensor] = []
        self.blocks[-1].register_forward_hook(lambda module, inputs, output: self.noted.append(output.detach()))


def with_dropout(strategy: str) -> tuple[Tensor, list[float]]:
    L.seed_everything(3, verbose=False)
    recorder, module = Recorder(), WithDropout()
    make_trainer(build_strategy(strategy), 2, callbacks=[recorder]).fit(module, batches("hard", 1))
    return torch.stack(module.noted[-STEPS:]), recorder.outcome.losses


@pytest.mark.parametrize("strategy", ["tp_custom", "tp_custom:recompute=full"])
def test_dropout_of_hidden_states_is_equal_on_peers(ranks: Any, strategy: str) -> None:
    (first, losses), (second, _) = ranks(2).run(with_dropout, strategy)
    assert torch.equal(first, second)
    assert len(losses) == STEPS
    assert all(loss < 10 for loss in losses)


def seeded_by_rank(strategy: str) -> dict[str, Tensor]:
    torch.manual_seed(dist.get_rank())
    recorder = Recorder()
    make_trainer(build_strategy(strategy), 2, callbacks=[recorder]).fit(Hard(), batches("hard", 1, 1))
    return recorder.outcome.initial


def test_ranks_start_from_the_weights_of_the_first(ranks: Any) -> None:
    torch.manual_seed(0)
    assert difference(ranks(2).run(seeded_by_rank, "tp_custom")[0], Hard().state_dict()) == 0.0


# Refusals -----------------------------------------------------------------------------------------------------------


class Narrow(Hard):
    """Ten features in the middle, which three or four ranks cannot share."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer, make=lambda: nn.Sequential(nn.Linear(16, 10), nn.GELU(), nn.Linear(10, 16)))


class NeedsMore(nn.Module):
    """Takes an object, which nobody can guess."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor, settings: Any) -> Tensor:
        return x + self.down(F.gelu(self.up(x) * settings.scale))


class Untraceable(Hard):
    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer, make=NeedsMore)

    def loss(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, SimpleNamespace(scale=1.0))
        return next_token_loss(self.head(x), tokens)


class Lone(Hard):
    """One map a layer: there is no pair of maps with features between them."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer, make=lambda: nn.Sequential(nn.Linear(16, 16), nn.GELU()))


REFUSED = {
    **TENSOR_MODULES, "narrow": Narrow, "untraceable": Untraceable, "lone": Lone, "lstm": CASES["lstm"],
    "three_key_heads": lambda: Llama(kv_heads=4),
}  # fmt: skip


@pytest.mark.parametrize(
    ("case", "size", "options", "words"),
    [
        ("byte_gpt", 4, "", ["model.blocks.0: tensor=4 cannot share 2 heads; possible: 1, 2"]),
        ("llama", 3, "", ["tensor=3 cannot share 4 heads and 2 heads of keys and values; possible: 1, 2, 4"]),
        ("encoder", 8, "", ["cannot share 4 heads", "possible: 1, 2, 4"]),
        ("narrow", 4, "", ["tensor=4 does not divide the 10 outputs of blocks.0.0", "possible: 1, 2, 5, 10"]),
        ("hard", 2, "tensor_plan={upp: colwise}", ["'upp' names no linear map of the layers", "up"]),
        ("hard", 2, "tensor_plan={up: columns}", ["'columns' for 'up' is unknown", "colwise, rowwise, replicate"]),
        ("hard", 2, "tensor_plan={norm1: colwise}", ["'norm1' names no linear map"]),
        ("hard", 2, "tensor_plan={head: colwise}", ["'head' names no linear map of the layers"]),
        ("hard", 2, "tensor_plan={up: replicate}", ["no branch of linear maps"]),
        ("hard", 2, "tensor_plan={}", ["no branch of linear maps"]),
        ("untraceable", 2, "", ["blocks.0 (NeedsMore) could not be run on hidden states", "tensor_plan="]),
        ("lone", 2, "", ["tensor=2: no branch of linear maps was found", "tensor=1"]),
        ("lstm", 2, "", ["tensor=2 works layer by layer, and LSTMModel has no stack of repeated layers", "layers="]),
        (
            "narrow", 4, "tensor_plan={blocks.*.0: colwise, upp: columns}",
            ["5 problems", "'upp' names no", "'columns' for 'upp'", "does not divide the 10 outputs"],
        ),
    ],
)  # fmt: skip
def test_refused_before_processes_start(
    case: str, size: int, options: str, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("subprocess.Popen", lambda *args, **kwargs: pytest.fail("a process was started"))
    trainer = make_trainer(build_strategy(f"tp_custom:{options}"), size)
    with pytest.raises(ConfigurationError) as caught:
        trainer.fit(REFUSED[case](), batches("byte_gpt", 1))
    assert not dist.is_initialized()
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)


class Scaled(nn.Linear):
    """A linear map that is none: its result is doubled."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class Grouped(nn.Module):
    """A convolution between the maps, which knows how many channels there are."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.mix = nn.Conv1d(32, 32, 3, padding=1, groups=32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.mix(self.up(x).transpose(1, 2)).transpose(1, 2))


class Doubling(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(16, 32), nn.GELU(), Scaled(32, 16))


class NotLinear(Hard):
    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer, make=Doubling)


class Convolved(Hard):
    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer, make=Grouped)


def refusal(make: Any, options: str) -> str:
    try:
        make_trainer(build_strategy(f"tp_custom:{options}"), 2).fit(make(), batches("byte_gpt", 1))
    except ConfigurationError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (NotLinear, "", ["no branch of linear maps was found", "tensor_plan", "tensor=1"]),
        (TENSOR_MODULES["configure_model"], "tensor_plan={upp: colwise}", ["'upp' names no linear map"]),
    ],
)
def test_a_layer_that_cannot_be_split_is_refused(ranks: Any, make: Any, options: str, words: list[str]) -> None:
    message = ranks(2).run(refusal, make, options)[0]
    assert [word for word in words if word not in message] == [], message


def test_what_would_be_refused_can_be_left_whole(ranks: Any) -> None:
    assert ranks(2).run(refusal, NotLinear, "tensor_plan={blocks.*.0: colwise}") == ["", ""]
    assert ranks(2).run(refusal, Convolved, "") == ["", ""]  # what torch cannot split runs on whole tensors

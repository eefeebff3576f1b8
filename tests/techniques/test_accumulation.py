"""Every policy under every strategy against one process, and what each sends."""

from __future__ import annotations

import contextlib
import copy
import json
import weakref
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_parallel import ConfigurationError, DtypePolicy, MeshStrategy, _torch, build_strategy, full_state_dict
from lightning_parallel.techniques.buffers import apply_buffer_dtype
from lightning_parallel.techniques.compiling import apply_compile
from lightning_parallel.techniques.float8 import unfitting_violations
from lightning_parallel.techniques.offload import OffloadedState
from lightning_parallel.techniques.recompute import apply_recompute, parse_recompute, statistics_violations
from tests.collectives import collectives_of_a_window
from tests.data import loader, loader_of
from tests.jobs.lifecycle import fit_twice
from tests.models.cases import CASES, GPT, LENGTH, VOCABULARY, Block, ByteGPT, Case, next_token_loss
from tests.parity import TOLERANCE, Outcome, Recorder, difference, is_moving, make_trainer, train, trainer_for, worst
from tests.rank_pool import RankError

MATRIX = json.loads((Path(__file__).parents[1] / "matrices" / "policy_matrix.json").read_text())
BF16 = 2e-2
"""On the loss: bf16 has 8 bits of mantissa, and a half batch rounds elsewhere than a whole one."""
CLIPS = {"gradient_clip_val": 0.5}
FREE = {"gradient_clip_val": None}
POLICIES: dict[str, tuple[str, dict[str, Any], float]] = {
    "clip by norm": ("", CLIPS, TOLERANCE),
    "clip by value": ("", {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}, TOLERANCE),
    "accumulation_sync=every": ("accumulation_sync=every", {"accumulate_grad_batches": 2}, TOLERANCE),
    "accumulation_sync=last": ("accumulation_sync=last", {"accumulate_grad_batches": 2}, TOLERANCE),
    "accumulation_sync=auto": ("accumulation_sync=auto", {"accumulate_grad_batches": 2}, TOLERANCE),
    "recompute=full": ("recompute=full", {}, TOLERANCE),
    "recompute=every:2": ("recompute=every:2", {}, TOLERANCE),
    "recompute=selective": ("recompute=selective", {}, TOLERANCE),
    "recompute=budget:0.5": ("recompute=budget:0.5,compile=layers", {}, TOLERANCE),
    "compile=layers": ("compile=layers", {}, TOLERANCE),
    "offload=optimizer": ("offload=optimizer", {}, TOLERANCE),
    "offload=all": ("offload=all", {}, TOLERANCE),
    "optimizer_in_backward=true": ("optimizer_in_backward=true", FREE, TOLERANCE),
    "bf16-mixed": ("", {"precision": "bf16-mixed"}, BF16),
    "bf16-true": ("", {"precision": "bf16-true"}, BF16),
    "16-mixed": ("", {"precision": "16-mixed"}, BF16),
    "float8=tensorwise": ("float8=tensorwise:emulate", {}, BF16),
    "float8=rowwise": ("float8=rowwise:emulate", {}, BF16),
}
"""Policy -> options of the strategy, arguments of the Trainer for both runs, largest difference allowed."""
NAMES = (
    "dp_custom", "ddp_custom", "zero1_custom", "zero2_custom", "fsdp_custom", "hsdp_custom", "cp_custom", "tp_custom",
    "pp_custom",
)  # fmt: skip
SLOW = 180.0
"""Seconds for a job that compiles: two ranks and the compiler share two cores."""


def run(strategy: str, num_ranks: int, trainer: dict[str, Any]) -> Outcome:
    if trainer.get("precision") == "16-mixed":  # Lightning takes bf16-mixed on the CPU, unless it is given the plugin
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
        trainer = {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}
    return train("byte_gpt", "adamw", strategy, num_ranks, **trainer)


def reference(policy: str) -> Outcome:
    """Plain Lightning in one process, with what the Trainer is given; in fp32 where the policy is another dtype."""
    _, trainer, _ = POLICIES[policy]
    return run("auto", 1, {key: value for key, value in trainer.items() if key != "precision"})


@pytest.mark.parametrize("policy", POLICIES)
def test_policies_equal_one_process(ranks: Any, policy: str) -> None:
    options, trainer, tolerance = POLICIES[policy]
    expected = reference(policy)
    assert is_moving(expected)
    found = {name: outcome_of(ranks, name, options, trainer, expected, tolerance) for name in NAMES}
    assert found == MATRIX["cells"][policy]


def outcome_of(
    ranks: Any, name: str, options: str, trainer: dict[str, Any], expected: Outcome, tolerance: float
) -> str:
    size = {"dp_custom": 1, "hsdp_custom": 4}.get(name, 2)
    strategy = f"{name}:{options}" if options else name
    try:
        make_trainer(build_strategy(strategy), size)
    except ConfigurationError as error:
        return f"refused: {error}".replace("\n", " ").partition("; Possible")[0].partition(". Possible")[0]
    ours = run(strategy, 1, trainer) if size == 1 else ranks(size).run(run, strategy, size, trainer, deadline=SLOW)[0]
    assert len(ours.losses) == len(expected.losses)
    losses = max(abs(a - b) / abs(b) for a, b in zip(ours.losses, expected.losses, strict=True))
    measure = losses if tolerance == BF16 else worst(ours, expected)
    assert measure <= tolerance, (name, measure)  # never NaN: a comparison with it is false
    assert is_moving(ours)
    return "runs"


def test_the_matrix_is_complete() -> None:
    assert list(MATRIX["cells"]) == MATRIX["policies"] == list(POLICIES)
    assert MATRIX["names"] == list(NAMES)


# Accumulation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "size", "reduces", "all_reduces"),
    [
        # Three layers and the root. A byte a parameter is agreed on where gradients are reduced.
        ("fsdp_custom:accumulation_sync=every", 2, 4 * 4, 4),
        ("fsdp_custom:accumulation_sync=last", 2, 4, 1),
        ("fsdp_custom", 2, 4, 1),  # auto: these few gradients fit
        ("zero2_custom:accumulation_sync=last", 2, 4, 1),
        ("hsdp_custom:accumulation_sync=every", 4, 4 * 4, 4 + 4),
        ("hsdp_custom:accumulation_sync=last", 4, 4, 4 + 1),
        ("ddp_custom:accumulation_sync=every", 2, 0, None),
    ],
)
def test_reductions_of_a_window_of_four(ranks: Any, strategy: str, size: int, reduces: int, all_reduces: Any) -> None:
    counts = ranks(size).run(collectives_of_a_window, strategy, 4)[0]
    assert counts.number("reduce_scatter") == reduces, counts
    assert all_reduces is None or counts.number("all_reduce") == all_reduces, counts


def windows(strategy: str, num_ranks: int, kind: str) -> dict[str, Any]:
    """Two epochs of seven microsteps under one kind of accumulation."""
    L.seed_everything(3, verbose=False)
    module: Any = Manual("adamw") if kind == "manual" else CASES["bare_parameter"]("adamw")
    options: dict[str, Any] = {"max_epochs": 2}
    if kind == "int":
        options["accumulate_grad_batches"] = 3
    if kind == "scheduler":
        options["callbacks"] = [GradientAccumulationScheduler({0: 2, 1: 3})]
    if kind != "manual":
        options["gradient_clip_val"] = 0.5
    trainer = trainer_for(strategy, num_ranks, **options)
    trainer.fit(module, loader(num_ranks, 7))
    return full_state_dict(trainer)


class Manual(CASES["bare_parameter"]):  # type: ignore[misc]
    """Accumulates by hand, and says which backward is the last."""

    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        is_last = batch_idx % 3 == 2 or batch_idx == 6
        with optimizer.toggle_model(sync_grad=is_last):
            self.manual_backward(self.loss(*batch) / 3)
        if is_last:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("kind", ["int", "scheduler", "manual"])
@pytest.mark.parametrize("mode", ["every", "last", "auto"])
@pytest.mark.parametrize("name", ["ddp_custom", "zero1_custom", "fsdp_custom", "hsdp_custom"])
def test_every_way_to_accumulate(ranks: Any, name: str, mode: str, kind: str) -> None:
    size = 4 if name == "hsdp_custom" else 2
    ours = ranks(size).run(windows, f"{name}:accumulation_sync={mode}", size, kind)[0]
    assert difference(ours, windows("auto", 1, kind)) < TOLERANCE


def big_batch(strategy: str, num_ranks: int, accumulate: int) -> dict[str, Any]:
    L.seed_everything(3, verbose=False)
    trainer = trainer_for(strategy, num_ranks, accumulate_grad_batches=accumulate)
    trainer.fit(
        ByteGPT("adamw"),
        loader_of("byte_gpt", steps=4 * accumulate, global_batch=16 // accumulate, num_ranks=num_ranks),
    )
    return full_state_dict(trainer)


@pytest.mark.parametrize("mode", ["every", "last"])
def test_a_window_equals_one_big_batch(ranks: Any, mode: str) -> None:
    ours = ranks(2).run(big_batch, f"fsdp_custom:accumulation_sync={mode}", 2, 4)[0]
    assert difference(ours, big_batch("auto", 1, 1)) < TOLERANCE


class NeverSynchronizes(Manual):
    """Steps after a backward that was said not to be the last: Lightning's DDP strategy lets the ranks drift apart."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        with optimizer.toggle_model(sync_grad=False):
            self.manual_backward(self.loss(*batch) / 2)
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()


def never_synchronized(strategy: str, num_ranks: int) -> dict[str, Any]:
    L.seed_everything(3, verbose=False)
    trainer_for(strategy, num_ranks).fit(module := NeverSynchronizes("sgd"), loader(num_ranks, 6))
    return module.state_dict()


@pytest.mark.parametrize("name", ["ddp_custom", "zero1_custom", "fsdp_custom", "zero2_custom", "hsdp_custom"])
def test_a_step_without_a_last_microstep(ranks: Any, name: str) -> None:
    size = 4 if name == "hsdp_custom" else 2
    strategy = name if name in ("ddp_custom", "zero1_custom") else f"{name}:accumulation_sync=last"
    expected = never_synchronized("auto", 1)
    for ours in ranks(size).run(never_synchronized, strategy, size):
        assert difference(ours, expected) < TOLERANCE


class HoldsOne(CASES["gan"]):  # type: ignore[misc]
    """The generator's window is two batches, of which none is said to be the last; the discriminator's is one."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        noise, real = batch
        generate, discriminate = self.optimizers()
        with generate.toggle_model(sync_grad=False):
            self.manual_backward(F.softplus(-self.discriminator(self.generator(noise) + self.shift)).mean())
        with discriminate.toggle_model():
            fake = (self.generator(noise) + self.shift).detach()
            loss = F.softplus(-self.discriminator(real)).mean() + F.softplus(self.discriminator(fake)).mean()
            self.manual_backward(loss)
        discriminate.step()
        discriminate.zero_grad()
        if batch_idx % 2:
            generate.step()
            generate.zero_grad()


def hold_one(strategy: str, num_ranks: int) -> dict[str, Any]:
    L.seed_everything(3, verbose=False)
    trainer = trainer_for(strategy, num_ranks)
    trainer.fit(HoldsOne("adamw"), loader(num_ranks, 6, "gan"))
    return full_state_dict(trainer)


@pytest.mark.parametrize("mode", ["every", "last"])
@pytest.mark.parametrize("name", ["ddp_custom", "zero1_custom", "fsdp_custom", "zero2_custom", "hsdp_custom"])
def test_one_optimizer_holds_while_the_other_steps(ranks: Any, name: str, mode: str) -> None:
    size = 4 if name == "hsdp_custom" else 2
    ours = ranks(size).run(hold_one, f"{name}:accumulation_sync={mode}", size)[0]
    assert difference(ours, hold_one("auto", 1)) < TOLERANCE


class Alternating(Case):
    """Two networks in alternate batches under manual optimization, updated every second batch by one optimizer."""

    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer)
        self.automatic_optimization = False
        self.first, self.second, self.third = GPT(), GPT(depth=2), nn.Linear(4, 4)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        network = self.second if batch_idx % 2 else self.first
        self.manual_backward(next_token_loss(network(batch[0]), batch[0]))
        if batch_idx % 2:
            self.optimizers().step()
            self.optimizers().zero_grad()


class AccumulatingGAN(CASES["gan"]):  # type: ignore[misc]
    """Each optimizer is toggled, and steps every second batch."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        noise, real = batch
        generate, discriminate = self.optimizers()
        for optimizer in (discriminate, generate):
            self.toggle_optimizer(optimizer)
            fake = self.discriminator(self.generator(noise) + self.shift)
            loss = F.softplus(-fake if optimizer is generate else fake).mean()
            if optimizer is discriminate:
                loss = loss + F.softplus(-self.discriminator(real)).mean()
            self.manual_backward(loss / 2)
            if batch_idx % 2:
                optimizer.step()
                optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)


class FrozenInTheMiddle(ByteGPT):
    """A layer is frozen between two microsteps of a window."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.model.blocks[1].requires_grad_(batch_idx not in (1, 3))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4)


class LateLayer(ByteGPT):
    """A layer that runs in the second window only."""

    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer)
        self.late = nn.ModuleList(Block() for _ in range(2))
        self.seen = 0

    def loss(self, tokens: Tensor) -> Tensor:
        self.seen += 1
        x = self.model.tokens(tokens)
        for block in [*self.model.blocks, *(self.late if self.seen > 2 else ())]:
            x = block(x)
        return next_token_loss(self.model.head(x), tokens)


FOUND: dict[str, tuple[Any, dict[str, Any], tuple[str, ...]]] = {
    "alternating": (Alternating, {}, ("ddp_custom:find_unused_parameters=true", "fsdp_custom", "zero2_custom")),
    "accumulating_gan": (AccumulatingGAN, {}, ("ddp_custom", "fsdp_custom", "zero2_custom", "hsdp_custom")),
    "frozen": (
        FrozenInTheMiddle,
        {"accumulate_grad_batches": 2},
        ("ddp_custom", "zero1_custom", "fsdp_custom", "hsdp_custom:accumulation_sync=last"),
    ),
}


def fit_found(name: str, strategy: str, num_ranks: int) -> dict[str, Any]:
    L.seed_everything(3, verbose=False)
    make, options, _ = FOUND[name]
    trainer = trainer_for(strategy, num_ranks, **options)
    trainer.fit(make("adamw"), loader(num_ranks, 6, "gan" if "gan" in name else "byte_gpt"))
    return full_state_dict(trainer)


@pytest.mark.parametrize(("name", "strategy"), [(name, each) for name in FOUND for each in FOUND[name][2]])
def test_windows_of_unusual_steps(ranks: Any, name: str, strategy: str) -> None:
    size = 4 if strategy.startswith("hsdp_custom") else 2
    assert difference(ranks(size).run(fit_found, name, strategy, size)[0], fit_found(name, "auto", 1)) < TOLERANCE


@pytest.mark.skipif(not _torch.fsdp.CAN_REDUCE_UNUSED, reason="copies are averaged in each microstep before torch 2.13")
@pytest.mark.parametrize("mode", ["auto", "every"])
def test_freezing_in_the_middle_of_a_hybrid_window_is_refused(ranks: Any, mode: str) -> None:
    with pytest.raises(RankError, match="frozen or thawed between two microsteps"):
        ranks(4).run(fit_found, "frozen", f"hsdp_custom:accumulation_sync={mode}", 4)


def late_layer(strategy: str, num_ranks: int) -> list[float]:
    L.seed_everything(3, verbose=False)
    recorder = Recorder()
    options = {"callbacks": [recorder], "accumulate_grad_batches": 2, "precision": "bf16-mixed"}
    trainer_for(strategy, num_ranks, **options).fit(LateLayer("sgd"), loader(num_ranks, 6))
    return recorder.outcome.losses


@pytest.mark.parametrize("name", ["fsdp_custom", "hsdp_custom"])
def test_a_layer_that_has_not_run_holds_nothing(ranks: Any, name: str) -> None:
    size = 4 if name == "hsdp_custom" else 2
    ours = ranks(size).run(late_layer, f"{name}:accumulation_sync=last", size)[0]
    assert ours == pytest.approx(late_layer("auto", 1), rel=BF16)


# Dtypes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("precision", "gathers", "reduces"),
    [
        ("32-true", torch.float32, torch.float32),
        ("bf16-mixed", torch.bfloat16, torch.float32),
        ("bf16-true", torch.bfloat16, torch.bfloat16),
    ],
)
@pytest.mark.parametrize(("name", "size"), [("fsdp_custom", 2), ("zero2_custom", 2), ("hsdp_custom", 4)])
def test_dtypes_of_collectives(ranks: Any, name: str, size: int, precision: str, gathers: Any, reduces: Any) -> None:
    counts = ranks(size).run(collectives_of_a_window, name, 1, precision=precision)[0]
    assert counts.dtypes("gather") == {gathers}, counts
    assert counts.dtypes("reduce_scatter") == {reduces}, counts


def own_policy(as_text: bool) -> Any:
    if as_text:
        return collectives_of_a_window("fsdp_custom:precision_policy={param: bfloat16, reduce: bfloat16}")
    policy = DtypePolicy(param=torch.bfloat16, reduce=torch.bfloat16)
    return collectives_of_a_window(MeshStrategy(precision_policy=policy))


@pytest.mark.parametrize("as_text", [True, False])
def test_a_policy_of_ones_own(ranks: Any, as_text: bool) -> None:
    counts = ranks(2).run(own_policy, as_text)[0]
    assert counts.dtypes("gather") == counts.dtypes("reduce_scatter") == {torch.bfloat16}


# Update in backward -----------------------------------------------------------------------------------------------


class Watching(Recorder):
    """How many gradients of sharded parameters exist when backward has ended."""

    gradients = 0

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self.gradients = max(self.gradients, sum(p.grad is not None for p in pl_module.parameters()))


def in_backward(case: str, name: str, num_ranks: int) -> tuple[dict[str, Any], int]:
    L.seed_everything(3, verbose=False)
    watching = Watching()
    strategy = name if name == "auto" else build_strategy(name)
    trainer = make_trainer(strategy, num_ranks, callbacks=[watching])
    trainer.fit(CASES[case]("adamw"), loader_of(case, steps=5, global_batch=8, num_ranks=num_ranks))
    return full_state_dict(trainer), watching.gradients


@pytest.mark.parametrize("case", ["byte_gpt", "bare_parameter", "hf_gpt2", "parameter_groups", "configure_model"])
@pytest.mark.parametrize("name", ["fsdp_custom", "zero2_custom"])
def test_update_in_backward(ranks: Any, name: str, case: str) -> None:
    ours, gradients = ranks(2).run(in_backward, case, f"{name}:optimizer_in_backward=true", 2)[0]
    theirs, all_gradients = in_backward(case, "auto", 1)
    assert difference(ours, theirs) < TOLERANCE
    assert gradients <= 1 < all_gradients  # a scalar stays whole, and is updated after backward


def resumed(strategy: str, num_ranks: int, path: str, saves: bool) -> dict[str, Any]:
    L.seed_everything(3 if saves else 11, verbose=False)
    trainer = trainer_for(strategy, num_ranks, max_epochs=1 if saves else 2)
    trainer.fit(CASES["parameter_groups"]("adamw"), loader(num_ranks), ckpt_path=None if saves else path)
    if saves:
        trainer.save_checkpoint(path)
    return full_state_dict(trainer)


@pytest.mark.parametrize("option", ["optimizer_in_backward=true", "offload=optimizer", "recompute=full"])
def test_policies_after_resume(ranks: Any, option: str, tmp_path: Path) -> None:
    path = str(tmp_path / "half.ckpt")
    ranks(2).run(resumed, "ddp_custom", 2, path, saves=True)
    expected = resumed("auto", 1, path, saves=False)
    assert difference(ranks(2).run(resumed, f"fsdp_custom:{option}", 2, path, saves=False)[0], expected) < TOLERANCE


def test_partly_frozen_modules_update_in_backward(ranks: Any) -> None:
    ours, _ = ranks(2).run(in_backward, "frozen_lora", "fsdp_custom:optimizer_in_backward=true", 2)[0]
    assert difference(ours, in_backward("frozen_lora", "auto", 1)[0]) < TOLERANCE


# Recompute, compile, offload, float8 ------------------------------------------------------------------------------


class LiveBytes(TorchDispatchMode):
    """The most bytes of tensors that were alive at once: those that a step made, and still held."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {id(t.untyped_storage()) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and id(storage := tensor.untyped_storage()) not in given:
                size = storage.nbytes()
                self.now += size
                weakref.finalize(storage, self._free, size)
        self.peak = max(self.peak, self.now)
        return result

    def _free(self, size: int) -> None:
        self.now -= size


def peak_of(recompute: str) -> tuple[int, list[Tensor]]:
    """Bytes at the peak of forward and backward, and the gradients, of a model with dropout."""
    torch.manual_seed(0)
    model = DeepGPT()
    apply_recompute(list(model.blocks), parse_recompute(recompute))
    tokens = torch.randint(0, VOCABULARY, (8, LENGTH))
    with LiveBytes() as mode:
        next_token_loss(model(tokens), tokens).backward()
    return mode.peak, [p.grad for p in model.parameters()]


class DeepGPT(GPT):
    def __init__(self) -> None:
        super().__init__(depth=6)
        for block in self.blocks:
            block.mlp.append(nn.Dropout(0.5))


def test_recompute_lowers_the_peak_and_replays_dropout() -> None:
    whole, gradients = peak_of("none")
    peaks = {rule: peak_of(rule) for rule in ("full", "every:2", "every:3", "selective")}
    assert peaks["full"][0] < peaks["every:2"][0] < peaks["every:3"][0] < whole
    assert peaks["full"][0] < peaks["selective"][0] < whole
    for _, others in peaks.values():
        assert all(torch.equal(a, b) for a, b in zip(gradients, others, strict=True))


def test_selective_keeps_attention_and_half_the_products() -> None:
    """Counted in backward: what was kept is not computed again."""
    torch.manual_seed(0)
    counts: dict[str, Counter[str]] = {}
    for rule in ("none", "full", "selective"):
        block = Block()
        apply_recompute([block], parse_recompute(rule))
        loss = block(torch.randn(2, 8, 16)).sum()
        with Operations() as mode:
            loss.backward()
        counts[rule] = mode.counts

    def again(rule: str, part: str) -> int:
        return sum(n - counts["none"][op] for op, n in counts[rule].items() if part in op)

    assert again("full", "mm") == 3  # nobody needs the result of the fourth product
    assert again("selective", "mm") == 1
    forward = "_scaled_dot_product_flash_attention_for_cpu.default"
    assert counts["full"][forward] == 1
    assert counts["selective"][forward] == 0


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func).removeprefix("aten.")] += 1
        return func(*args, **(kwargs or {}))


def test_graphs_of_a_model_with_a_cache_do_not_grow() -> None:
    torch._dynamo.reset()
    counter = CompileCounter()
    model = Llama().model
    apply_compile(list(model.model.layers), backend=counter)
    tokens = torch.randint(0, VOCABULARY, (2, 8))
    model(input_ids=tokens, labels=tokens).loss.backward()
    assert counter.frame_count == 1


def compiled(depth: int, recompute: str) -> tuple[int, list[str]]:
    """How many graphs a model of `depth` layers takes over two lengths of batch, and its state-dict keys."""
    torch._dynamo.reset()
    graphs = 0

    def backend(module: Any, inputs: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return module

    model = GPT(depth=depth)
    apply_recompute(list(model.blocks), parse_recompute(recompute))
    apply_compile(list(model.blocks), backend=backend)
    for length in (8, 8, 12, 16):
        tokens = torch.randint(0, VOCABULARY, (2, length))
        next_token_loss(model(tokens), tokens).backward()
    return graphs, list(model.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_graphs_do_not_grow_with_depth(recompute: str) -> None:
    graphs, keys = compiled(2, recompute)
    assert compiled(7, recompute)[0] == graphs <= 2  # one, and one for any length
    assert keys == list(GPT(depth=2).state_dict())


@pytest.mark.parametrize(
    ("options", "case"),
    [
        ("recompute=full", "hf_gpt2"),
        ("recompute=selective", "hf_gpt2"),
        ("recompute=selective", "encoder_decoder"),
        ("recompute=full", "configure_model"),
        ("float8=tensorwise:emulate", "byte_gpt"),
        ("float8=tensorwise:emulate", "configure_model"),
    ],
)
@pytest.mark.parametrize("name", ["ddp_custom", "fsdp_custom"])
def test_other_modules_come_back_plain(ranks: Any, name: str, options: str, case: str) -> None:
    found = ranks(2).run(fit_twice, f"{name}:{options}", "fsdp_custom", 2, case)[0]
    assert found["marks"] == []
    assert all(found["same objects"]) or case == "configure_model"
    assert found["equal copies"]


@pytest.mark.parametrize(
    "name", ["ddp_custom:recompute=full", "fsdp_custom:recompute=full", "zero2_custom:recompute=full"]
)
def test_recompute_with_a_cache_in_the_layers(ranks: Any, name: str) -> None:
    """Hugging Face's Llama hands its layers a cache in training, to which a second forward would add again."""
    expected = fit_llama("auto", 1)
    assert difference(ranks(2).run(fit_llama, name, 2)[0], expected) < TOLERANCE


class Llama(Case):
    def __init__(self) -> None:
        super().__init__("adamw")
        from transformers import LlamaConfig, LlamaForCausalLM

        self.model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=3,
                num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=LENGTH, pad_token_id=None,
            )
        )  # fmt: skip

    def loss(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens, labels=tokens).loss


class ReadsItsCache(Llama):
    """The second half of the sequence attends to the first through the cache."""

    def loss(self, tokens: Tensor) -> Tensor:
        first = self.model(input_ids=tokens[:, :8], labels=tokens[:, :8], use_cache=True)
        second = self.model(input_ids=tokens[:, 8:], labels=tokens[:, 8:], past_key_values=first.past_key_values)
        return first.loss + second.loss


@pytest.mark.parametrize("option", ["recompute=full", pytest.param("compile=layers", marks=pytest.mark.slow)])
def test_a_cache_that_is_read_is_refused(option: str) -> None:
    trainer = trainer_for(f"dp_custom:{option}", 1)
    with pytest.raises(ConfigurationError, match="for the second time"):
        trainer.fit(ReadsItsCache(), loader(1))


def fit_llama(strategy: str, num_ranks: int) -> dict[str, Any]:
    L.seed_everything(3, verbose=False)
    trainer = trainer_for(strategy, num_ranks)
    trainer.fit(Llama(), loader(num_ranks))
    return full_state_dict(trainer)


class NormBlock(nn.Module):
    """A layer with statistics and a counter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1  # what forward sees depends on what it wrote
        return x + self.norm(self.linear(x)).relu() * self.calls


@pytest.mark.parametrize("recompute", ["full", "every:2", "selective"])
def test_recompute_writes_buffers_once(recompute: str) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*(NormBlock() for _ in range(3)))
    ours = copy.deepcopy(plain)
    apply_recompute(list(ours), parse_recompute(recompute))
    for _ in range(3):
        x = torch.randn(8, 4)
        ours(x).pow(2).sum().backward()
        plain(x).pow(2).sum().backward()
    for (name, a), b in zip(ours.state_dict().items(), plain.state_dict().values(), strict=True):
        assert torch.allclose(a, b, atol=1e-6), name
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad, atol=1e-5)


def test_offloaded_state_is_away_between_updates() -> None:
    parameter = nn.Parameter(torch.randn(4, 4))
    optimizer = torch.optim.AdamW([parameter], lr=0.1)
    moves: list[str] = []

    def away(value: Tensor) -> Tensor:
        moves.append("away")
        return value.to(torch.float64)  # stands for the host: there is no second device here

    def back(value: Tensor, parameter: Tensor) -> Tensor:
        moves.append("back")
        return value.to(parameter.dtype)

    offloaded = OffloadedState(optimizer, to_host=away, to_device=back)
    reference = nn.Parameter(parameter.detach().clone())
    expected = torch.optim.AdamW([reference], lr=0.1)

    def closure() -> Tensor:
        assert all(value.dtype == torch.float64 for value in optimizer.state[parameter].values() if value.ndim)
        parameter.grad = parameter.detach() * 2
        return parameter.sum()

    for _ in range(3):
        optimizer.step(closure)
        reference.grad = reference.detach() * 2
        expected.step()
        assert optimizer.state[parameter]["exp_avg"].dtype == torch.float64
        assert optimizer.state[parameter]["step"].dtype == torch.float32
    assert torch.equal(parameter, reference)
    offloaded.detach()
    assert optimizer.state[parameter]["exp_avg"].dtype == torch.float32
    assert moves == ["away"] * 2 + ["back", "back", "away", "away"] * 2 + ["back"] * 2


@pytest.mark.parametrize(
    ("strategy", "trainer", "words"),
    [
        ("fsdp_custom:recompute=some", {}, ["recompute='some'", "every:2", "selective"]),
        ("fsdp_custom:recompute=every:0", {}, ["every:0"]),
        ("fsdp_custom:recompute=budget:0.5", {}, ["compile='none'", "compile='layers'", "selective"]),
        ("ddp_custom:recompute=budget:2,compile=layers", {}, ["budget:2"]),
        ("ddp_custom:compile=all", {}, ["compile='all'", "none, layers"]),
        ("fsdp_custom:float8=tensorwise", {}, ["compute capability 8.9", "the device is cpu", "tensorwise:emulate"]),
        ("zero1_custom:float8=fp4:emulate", {}, ["float8='fp4:emulate'", "tensorwise, rowwise"]),
        ("fsdp_custom:accumulation_sync=never", {}, ["accumulation_sync='never'", "auto, every, last"]),
        ("ddp_custom:accumulation_sync=some,offload=all", {}, ["2 problems", "fsdp_offload_custom", "'some'"]),
        ("ddp_custom:reshard=2", {}, ["no option 'reshard'", "whole on every rank", "fsdp_custom"]),
        ("fsdp_custom:precision_policy={param: int8}", {}, ["param='int8'", "bfloat16"]),
    ],
)
def test_what_cannot_hold_is_refused(strategy: str, trainer: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        make_trainer(build_strategy(strategy), 2, **trainer)
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)


@pytest.mark.parametrize(
    ("strategy", "case", "trainer", "words"),
    [
        ("fsdp_custom:recompute=full,compile=layers", "lstm", {}, ["recompute='full'", "compile='layers'", "no stack"]),
        ("ddp_custom:recompute=full", "lstm", {}, ["LSTMModel has no stack", "layers="]),
        ("dp_custom:compile=layers", "lstm", {}, ["no stack"]),
        (
            "fsdp_custom:optimizer_in_backward=true,offload=optimizer",
            "byte_gpt",
            {"gradient_clip_val": 1.0, "accumulate_grad_batches": 2},
            ["gradient_clip_val", "accumulate_grad_batches=2", "offload='all'", "3 problems"],
        ),
        ("fsdp_custom:optimizer_in_backward=true", "gan", {}, ["manual optimization"]),
    ],
)
def test_what_the_module_cannot_do_is_refused(
    strategy: str, case: str, trainer: dict[str, Any], words: list[str]
) -> None:
    size = 1 if strategy.startswith("dp_") else 2
    with pytest.raises(ConfigurationError) as caught:
        make_trainer(build_strategy(strategy), size, **trainer).fit(CASES[case](), loader(1, 1, case))
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)


def test_statistics_are_not_compiled_and_recomputed() -> None:
    layers = [NormBlock()]
    assert "BatchNorm1d" in statistics_violations(layers, "full", compiles=True)[0]
    assert statistics_violations(layers, "full", compiles=False) == []
    assert statistics_violations([layer.eval() for layer in layers], "full", compiles=True) == []
    assert statistics_violations([Block()], "selective", compiles=True) == []


def test_float8_needs_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"lightning_parallel\[float8\]"):
        make_trainer(build_strategy("fsdp_custom:float8=rowwise:emulate"), 2)


def test_float8_needs_maps_that_fit() -> None:
    assert unfitting_violations([nn.Linear(8, 24), nn.Linear(16, 32)], "tensorwise") == []
    assert "multiples of 16 (8 x 24)" in unfitting_violations([nn.Linear(8, 24)], "tensorwise")[0]
    with pytest.raises(ConfigurationError, match="0 linear maps"):  # Hugging Face's GPT-2 has Conv1D
        make_trainer(build_strategy("ddp_custom:float8=tensorwise:emulate"), 2).fit(CASES["hf_gpt2"](), loader(1, 1))


class WithTable(nn.Module):
    """A table that is no parameter, as those of rotary positions."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.full((4,), 1 / 3))
        self.register_buffer("count", torch.zeros(1))
        self.seen: torch.dtype | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.table.dtype
        self.count += 1
        return x * self.table


def test_buffers_are_seen_in_another_dtype() -> None:
    module = nn.Sequential(WithTable(), nn.BatchNorm1d(4))
    table = module[0].table
    apply_buffer_dtype(module, torch.bfloat16)
    module(torch.ones(2, 4))
    assert module[0].seen == torch.bfloat16
    assert module[0].table is table
    assert module[0].count.tolist() == [1.0]
    assert module[1].running_mean.dtype == torch.float32


class Breaks(ByteGPT):
    broken = True

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.broken and batch_idx == 1:
            raise RuntimeError("broken")
        return super().training_step(batch, batch_idx)


def after_an_error() -> list[str]:
    module = Breaks("sgd")
    with contextlib.suppress(RuntimeError):
        trainer_for("fsdp_custom", 2).fit(module, loader(2))
    module.broken = False
    try:
        trainer_for("fsdp_custom:recompute=full", 2).fit(module, loader(2))
    except ConfigurationError as error:
        return list(error.violations)
    return []


def test_other_policies_after_an_error_are_refused(ranks: Any) -> None:
    assert "cannot be sharded by other rules (layer:" in ranks(2).run(after_an_error)[0][0]


# Auto -------------------------------------------------------------------------------------------------------------


def chosen(free: int) -> tuple[int, list[str]]:
    """The reduce-scatters of a second window of four where so many bytes are free, and what is said."""
    told: list[str] = []
    with (
        mock.patch("lightning_parallel.techniques.accumulation.headroom", return_value=free),
        mock.patch("lightning_parallel.strategies.pipelined_strategy.rank_zero_info", told.append),
    ):
        counts = collectives_of_a_window("fsdp_custom", 4)
    return counts.number("reduce_scatter"), [message for message in told if "accumulation_sync" in message]


def test_auto_takes_what_fits(ranks: Any) -> None:
    needed = 4 * sum(p.numel() for p in ByteGPT().parameters())
    for free, reduces, word in [(4 * needed, 4, "the last"), (2 * needed, 16, "every")]:  # two ranks share the host
        (found, told), (other, _) = ranks(2).run(chosen, free)
        assert found == other == reduces
        assert len(told) == 1
        assert word in told[0]

"""Pipeline parallel: each rank some of the layers, and numbers equal to those of one process."""

from __future__ import annotations

import copy
import os
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from torchmetrics import CatMetric, MeanMetric

from lightning_parallel import ConfigurationError, build_strategy, full_state_dict
from lightning_parallel.callbacks import GradientNorm
from lightning_parallel.module.placeholders import is_placeholder
from lightning_parallel.techniques.pipeline.microbatches import batch_size_of, cut_batch, merge_outputs
from lightning_parallel.techniques.pipeline.schedules import PipelinePolicy
from lightning_parallel.techniques.pipeline.stage_plan import StepCosts, balanced
from lightning_parallel.techniques.sharding import is_sharded
from tests.collectives import Collectives
from tests.data import GLOBAL_BATCH, batches, data_of
from tests.jobs.lifecycle import marks
from tests.models.cases import CASES, GPT, next_token_loss
from tests.models.pipelined import Deep, DeepTied
from tests.models.tables import PIPELINE_MODULES
from tests.parity import TOLERANCE, Outcome, Recorder, make_trainer, reference, train, worst


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("case", PIPELINE_MODULES)
def test_layers_over_two_ranks(ranks: Any, case: str, optimizer: str) -> None:
    ours = ranks(2).run(train, case, optimizer, "pp_custom", 2, 1)[0]
    difference = worst(ours, reference(case, optimizer))
    print(f"{case} {optimizer}: {difference:.1e}")
    assert difference < TOLERANCE


SCHEDULED = [
    "fsdp_custom:pipeline=2,schedule=interleaved,virtual_stages=2",
    "fsdp_custom:pipeline=2,schedule=zbv",
    "fsdp_custom:pipeline=2,stages=[1,3],recompute=full,schedule=gpipe",
]


@pytest.mark.parametrize("schedule", ["interleaved,virtual_stages=2", "zbv", "dualpipev,microbatches=4"])
@pytest.mark.parametrize("cut", ["context=2", "context=2,context_attention=ring", "tensor=2,sequence=true"])
def test_sequences_are_cut_in_each_stage_of_a_rank(ranks: Any, cut: str, schedule: str) -> None:
    """Between two stages of a rank, others compute: what is cut in the first is joined at its end."""
    strategy = f"fsdp_custom:pipeline=2,{cut},schedule={schedule}"
    assert worst(ranks(4).run(train, "deep", "adamw", strategy, 4, 1)[0], reference("deep", "adamw")) < TOLERANCE


def on_two_machines(case: str) -> tuple[list[int], Outcome]:
    """The ranks of this stack, where the first two ranks are one machine and the others another."""
    rank = dist.get_rank()
    strategies: list[Any] = []
    build = build_strategy

    def keep(text: str) -> Any:
        strategies.append(build(text))
        return strategies[-1]

    places = {"NODE_RANK": str(rank // 2), "LOCAL_RANK": str(rank % 2)}
    with mock.patch.dict(os.environ, places), mock.patch("tests.parity.build_strategy", keep):
        outcome = train(case, "adamw", "pp_custom", 2, 2, num_nodes=2)
    return dist.get_process_group_ranks(strategies[0].mesh.pipeline_group), outcome


def test_stages_of_a_stack_are_on_one_machine(ranks: Any) -> None:
    found = ranks(4).run(on_two_machines, "deep_tied")
    assert [stack for stack, _ in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert worst(found[0][1], reference("deep_tied")) < TOLERANCE


@pytest.mark.parametrize(
    ("case", "strategy", "readers"),
    [
        ("deep_tied", "pp_custom", 1),
        ("deep_tied", "fsdp_custom:pipeline=2", 2),
        ("deep_tied", "zero2_custom:pipeline=2", 2),
        ("deep_tied", "fsdp_custom:pipeline=2,replicate=2", 2),
        ("head_first", "pp_custom", 1),
        ("bare_parameter", "fsdp_custom:pipeline=2,replicate=2", 2),
        ("bert", "fsdp_custom:pipeline=2", 2),
        ("varying_length", "fsdp_custom:pipeline=2", 2),
        *((case, strategy, 2) for case in ("deep_tied", "head_first") for strategy in SCHEDULED),
    ],
)
def test_products(ranks: Any, case: str, strategy: str, readers: int) -> None:
    difference = worst(ranks(4).run(train, case, "adamw", strategy, 4, readers)[0], reference(case))
    print(f"{case} {strategy}: {difference:.1e}")
    assert difference < TOLERANCE


@pytest.mark.parametrize(
    "options",
    [
        "schedule=gpipe",
        "schedule=gpipe,microbatches=2",
        "schedule=1f1b,microbatches=8",
        "schedule=interleaved,virtual_stages=2",
        "schedule=zbv",
        "schedule=dualpipev",
        "stages=[3,1]",
        "recompute=selective",
        "reshard=never",
    ],
)
def test_schedules(ranks: Any, options: str) -> None:
    difference = worst(
        ranks(2).run(train, "deep_tied", "adamw", f"pp_custom:{options}", 2, 1)[0], reference("deep_tied")
    )
    print(f"{options}: {difference:.1e}")
    assert difference < TOLERANCE


@pytest.mark.parametrize("schedule", ["interleaved,virtual_stages=2", "zbv"])
def test_two_stages_on_a_rank_write_buffers_once(ranks: Any, schedule: str) -> None:
    ours = ranks(2).run(train, "returns_tuples", "adamw", f"pp_custom:schedule={schedule}", 2, 1)[0]
    assert worst(ours, reference("returns_tuples")) < TOLERANCE


def ragged(strategy: str, num_ranks: int) -> Outcome:
    """Batches of 8, 8 and 5 samples; the last one cannot be cut."""
    L.seed_everything(3, verbose=False)
    recorder = Recorder()
    built = strategy if strategy == "auto" else build_strategy(strategy)
    trainer = make_trainer(built, num_ranks, callbacks=[recorder])
    trainer.fit(Deep(), DataLoader(data_of("byte_gpt", 21, GLOBAL_BATCH), batch_size=GLOBAL_BATCH))
    recorder.outcome.final = full_state_dict(trainer)
    return recorder.outcome


@pytest.mark.parametrize("options", ["microbatches=4", "schedule=interleaved,virtual_stages=2"])
def test_a_smaller_last_batch(ranks: Any, options: str) -> None:
    assert worst(ranks(2).run(ragged, f"pp_custom:{options}", 2)[0], ragged("auto", 1)) < TOLERANCE


@pytest.mark.parametrize(
    "strategy",
    [
        "fsdp_custom:pipeline=2,accumulation_sync=every",
        "fsdp_custom:pipeline=2,accumulation_sync=last",
        "fsdp_custom:pipeline=2,replicate=2",
        "fsdp_custom:pipeline=2,replicate=2,accumulation_sync=last",
    ],
)
def test_accumulation(ranks: Any, strategy: str) -> None:
    expected = reference("deep_tied", accumulate_grad_batches=2)
    ours = ranks(4).run(train, "deep_tied", "adamw", strategy, 4, 2, accumulate_grad_batches=2)[0]
    assert worst(ours, expected) < TOLERANCE


@pytest.mark.parametrize("case", ["deep_tied", "llama"])
def test_bf16(ranks: Any, case: str) -> None:
    """Microbatches round in other places: the largest difference read is 5e-3."""
    ours = ranks(2).run(train, case, "sgd", "pp_custom", 2, 1, precision="bf16-mixed")[0]
    assert worst(ours, reference(case, "sgd", precision="bf16-mixed")) < 2e-2


def scaled(strategy: str, num_ranks: int, num_readers: int) -> Outcome:
    """16-mixed: the loss of each microbatch is scaled. On the host, Lightning would make bf16 of it."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    return train("deep", "sgd", strategy, num_ranks, num_readers, plugins=[MixedPrecision("16-mixed", "cpu", scaler)])


def test_loss_scaling(ranks: Any) -> None:
    ours = ranks(4).run(scaled, "fsdp_custom:pipeline=2", 4, 2)[0]
    assert worst(ours, scaled("auto", 1, 1)) < 1e-3  # read: 4e-5


class Metered(DeepTied):
    """Logs in every way, and has metrics."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.accuracy = MeanMetric()
        self.val_loss = MeanMetric()
        self.losses = CatMetric()

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        logits = self(batch[0])
        loss = next_token_loss(logits, batch[0])
        right = (logits[:, :-1].argmax(-1) == batch[0][:, 1:]).float()
        self.accuracy.update(right)
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        self.log_dict({"loss": loss, "right": right.mean()}, on_step=True, on_epoch=True, prog_bar=True, sync_dist=True)
        self.log("samples", float(len(batch[0])), on_epoch=True, on_step=False, reduce_fx="sum", sync_dist=True)
        self.log("most", right.mean(1).max(), on_epoch=True, on_step=False, reduce_fx="max", sync_dist=True)
        return {"loss": loss, "logits": logits.detach()}

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self(batch[0])
        loss = next_token_loss(logits, batch[0])
        self.val_loss.update(loss, weight=len(batch[0]))
        self.losses.update(logits.mean((1, 2)))
        self.log("val_metric", self.val_loss)
        self.log("val_loss", loss, sync_dist=True)
        return loss

    def on_validation_epoch_end(self) -> None:
        losses = self.losses.compute()
        self.log_dict({"num_samples": float(len(losses)), "spread": losses.std()})
        self.losses.reset()

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])


def lifecycle(strategy: str, num_ranks: int, num_readers: int, folder: str) -> dict[str, Any]:
    """Validate, fit with validation and callbacks, test and predict, with the same objects and ragged last batches."""
    L.seed_everything(3, verbose=False)
    module = Metered()
    norms: list[float] = []
    outputs: list[Tensor] = []

    class Notes(L.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, out: Any, *args: Any) -> None:
            norms.append(float(trainer.callback_metrics["grad_norm"]))
            outputs.append(out["logits"])

    built = strategy if strategy == "auto" else build_strategy(strategy)
    best = ModelCheckpoint(folder, monitor="val_loss", filename="best-{epoch}")
    stops = EarlyStopping("val_loss", patience=1)
    trainer = make_trainer(
        built, num_ranks, num_sanity_val_steps=1, max_epochs=2, enable_checkpointing=True, inference_mode=False,
        callbacks=[GradientNorm(), Notes(), best, stops],
    )  # fmt: skip
    loader = batches("byte_gpt", num_readers)
    ragged = DataLoader(data_of("byte_gpt", 21, GLOBAL_BATCH), batch_size=GLOBAL_BATCH)
    found: dict[str, Any] = {"before": trainer.validate(module, ragged, verbose=False)}
    trainer.fit(module, loader, ragged)
    found["during"] = {name: float(value) for name, value in trainer.callback_metrics.items()}
    found["test"] = trainer.test(module, ragged, verbose=False)
    found["predictions"] = torch.cat(trainer.predict(module, ragged))
    found["norms"], found["best"] = norms, float(best.best_model_score)
    found["outputs"] = torch.cat(outputs)
    found["plain"] = type(module.model.blocks[0]).__module__ == "tests.models.cases" and "training_step" not in vars(
        module
    )
    found["weights"] = dict(module.state_dict())
    return found


def test_every_entry_point(ranks: Any, tmp_path: Any) -> None:
    expected = lifecycle("auto", 1, 1, str(tmp_path / "one"))
    for ours in ranks(2).run(lifecycle, "pp_custom", 2, 1, str(tmp_path / "two")):
        assert ours["plain"]
        for name in ("before", "test"):
            assert ours[name][0] == pytest.approx(expected[name][0], abs=TOLERANCE)
        for name in ("during", "norms", "best"):
            assert ours[name] == pytest.approx(expected[name], abs=TOLERANCE), name
        for name in ("predictions", "outputs"):
            assert torch.allclose(ours[name], expected[name], atol=1e-4), name
        assert all(torch.allclose(ours["weights"][k], v, atol=TOLERANCE) for k, v in expected["weights"].items())


def saved_in_validation(strategy: str, num_ranks: int, path: str) -> None:
    """A checkpoint that a hook of `validate` writes after a fit."""

    class Saves(L.Callback):
        def on_validation_end(self, trainer: Any, module: Any) -> None:
            trainer.save_checkpoint(path)

    L.seed_everything(3, verbose=False)
    module = Deep()
    trainer = make_trainer(strategy if strategy == "auto" else build_strategy(strategy), num_ranks)
    trainer.fit(module, batches("byte_gpt", 1))
    trainer.callbacks.append(Saves())
    trainer.validate(module, batches("byte_gpt", 1), verbose=False)


def test_a_checkpoint_of_validation(ranks: Any, tmp_path: Any) -> None:
    paths = [str(tmp_path / name) for name in ("one.ckpt", "two.ckpt")]
    saved_in_validation("auto", 1, paths[0])
    ranks(2).run(saved_in_validation, "pp_custom", 2, paths[1])
    one, two = (torch.load(path, weights_only=False)["optimizer_states"][0]["state"] for path in paths)
    assert one.keys() == two.keys()
    for number, state in one.items():
        assert torch.allclose(two[number]["exp_avg"], state["exp_avg"], atol=TOLERANCE)


def resumed(strategy: str, num_ranks: int, num_readers: int, path: str) -> Outcome:
    """One epoch, a checkpoint, and a second epoch from it with a fresh module and other first weights."""
    for epochs, seed, checkpoint in ((1, 3, None), (2, 4, path)):
        L.seed_everything(seed, verbose=False)
        recorder = Recorder()
        built = strategy if strategy == "auto" else build_strategy(strategy)
        trainer = make_trainer(built, num_ranks, callbacks=[recorder], max_epochs=epochs)
        trainer.fit(PIPELINE_MODULES["head_first"](), batches("head_first", num_readers), ckpt_path=checkpoint)
        trainer.save_checkpoint(path)
    recorder.outcome.final = full_state_dict(trainer)
    return recorder.outcome


def test_resume(ranks: Any, tmp_path: Any) -> None:
    expected = resumed("auto", 1, 1, str(tmp_path / "one.ckpt"))
    ours = ranks(4).run(resumed, "fsdp_custom:pipeline=2", 4, 2, str(tmp_path / "two.ckpt"))[0]
    assert worst(ours, expected) < TOLERANCE
    one, two = (torch.load(tmp_path / name, weights_only=False) for name in ("one.ckpt", "two.ckpt"))
    assert one["optimizer_states"][0]["state"].keys() == two["optimizer_states"][0]["state"].keys()
    for number, state in one["optimizer_states"][0]["state"].items():
        for name, value in state.items():
            theirs = two["optimizer_states"][0]["state"][number][name]
            assert torch.allclose(torch.as_tensor(value), torch.as_tensor(theirs), atol=TOLERANCE)


def fitted_twice(first: str, second: str, case: str) -> dict[str, Any]:
    """Fit under one name, look at the module, fit it under another, and give it away trained."""
    L.seed_everything(3, verbose=False)
    module, plain = PIPELINE_MODULES[case]("adamw"), PIPELINE_MODULES[case]("adamw")
    if case == "configure_model":
        plain.configure_model()
    objects = list(module.parameters())
    make_trainer(build_strategy(first), 2).fit(module, batches(case, 1, 3))
    found: dict[str, Any] = {
        "marks": [a for a, b in zip(marks(module), marks(plain), strict=True) if a != b],
        "same objects": [a is b for a, b in zip(module.parameters(), objects, strict=False)],
        "copies": all(torch.equal(v, copy.deepcopy(module).state_dict()[k]) for k, v in module.state_dict().items()),
    }
    readers = 1 if "pp_custom" in second else 2
    trainer = make_trainer(build_strategy(second), 2)
    trainer.fit(module, batches(case, readers, 3))
    found["weights"] = full_state_dict(trainer)
    return found


@pytest.mark.parametrize("case", ["hf_gpt2", "head_first", "configure_model"])
@pytest.mark.parametrize(("first", "second"), [("pp_custom", "ddp_custom"), ("pp_custom:microbatches=2", "pp_custom")])
def test_the_module_is_plain_afterwards(ranks: Any, first: str, second: str, case: str) -> None:
    expected = ranks(2).run(fitted_twice, "cp_custom", "fsdp_custom", case)[0]["weights"]
    for found in ranks(2).run(fitted_twice, first, second, case):
        assert found["marks"] == []
        assert all(found["same objects"])
        assert found["copies"]
        if found["weights"]:
            assert max(float((found["weights"][k] - v).abs().max()) for k, v in expected.items()) < TOLERANCE


# What a rank holds and sends ----------------------------------------------------------------------------------------


def held(strategy: str, num_ranks: int, case: str) -> tuple[int, int, list[str]]:
    """Elements in the memory of parameters and of optimizer state while training, and the layers with any."""
    found: list[Any] = []

    class Count(L.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            local = {n: p.to_local() for n, p in module.named_parameters() if isinstance(p, DTensor)}
            for name, parameter in module.named_parameters():
                if name not in local and not is_placeholder(parameter):
                    local[name] = parameter
                elif name not in local:
                    with pytest.raises(RuntimeError):
                        parameter.untyped_storage().data_ptr()
            states = trainer.optimizers[0].state.values()
            state = sum(value.numel() for each in states for name, value in each.items() if name != "step")
            layers = sorted({name.split(".")[2] for name in local if ".blocks." in name})
            found[:] = [sum(p.numel() for p in local.values()), state, layers, is_sharded(module)]

    module = PIPELINE_MODULES[case]("adamw") if case != "configured" else DeepConfigured()
    trainer = make_trainer(build_strategy(strategy), num_ranks, callbacks=[Count()])
    trainer.fit(module, batches("byte_gpt", 1, 2))
    return tuple(found)  # type: ignore[return-value]


class DeepConfigured(Deep):
    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        del self.model

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            self.model = GPT(depth=4)


@pytest.mark.parametrize("case", ["deep", "configured"])
def test_a_stage_holds_only_its_layers(ranks: Any, case: str) -> None:
    """And nobody gathers what no other rank has."""
    model = GPT(depth=4)
    layer = sum(p.numel() for p in model.blocks[0].parameters())
    before = model.tokens.weight.numel() + model.positions.weight.numel()
    after = sum(p.numel() for p in (*model.norm.parameters(), *model.head.parameters()))
    first, last = ranks(2).run(held, "pp_custom", 2, case)
    assert first == (before + 2 * layer, 2 * (before + 2 * layer), ["0", "1"], False)
    assert last == (after + 2 * layer, 2 * (after + 2 * layer), ["2", "3"], False)


def sent(strategy: str, num_readers: int) -> dict[str, int]:
    """Messages of hidden states, and reductions over data ranks, of the second step."""
    mode = Collectives()

    class Module(Deep):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                mode.__enter__()

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            if self.global_step == 1:
                mode.__exit__(None, None, None)

    trainer = make_trainer(build_strategy(strategy), dist.get_world_size())
    trainer.fit(Module(), batches("byte_gpt", num_readers, 3))
    count = dict.fromkeys(("send", "recv_", "reduce_scatter"), 0)
    for (kind, dtype), number in mode.counts.items():
        if dtype == torch.float32 and kind in count:
            count[kind] += number
    return count


def test_one_activation_and_one_gradient_a_microbatch(ranks: Any) -> None:
    for counted in ranks(2).run(sent, "pp_custom:microbatches=4", 1):
        assert (counted["send"], counted["recv_"]) == (4, 4)


@pytest.mark.parametrize("microbatches", [2, 4])
def test_gradients_are_reduced_once_a_step(ranks: Any, microbatches: int) -> None:
    """Two layers and what is around them on each rank, however many microbatches there are."""
    for counted in ranks(4).run(sent, f"fsdp_custom:pipeline=2,microbatches={microbatches}", 2):
        assert counted["reduce_scatter"] == 3


# Random numbers -----------------------------------------------------------------------------------------------------


class Dropped(Deep):
    """Notes what it draws before the layers, and the first numbers that each layer draws."""

    def __init__(self) -> None:
        super().__init__()
        self.outside: list[float] = []
        self.inside: list[Tensor] = []
        for block in self.model.blocks:
            block.mlp.append(_Noted(self.inside))

    def loss(self, tokens: Tensor) -> Tensor:
        self.outside.append(float(torch.rand(())))
        return super().loss(tokens)


class _Noted(nn.Module):
    def __init__(self, noted: list[Tensor]) -> None:
        super().__init__()
        self.noted = noted

    def forward(self, x: Tensor) -> Tensor:
        mask = F.dropout(torch.ones(64), training=self.training)
        self.noted.append(mask)
        return x * mask[:16]


def drawn(strategy: str) -> tuple[list[float], list[Tensor]]:
    L.seed_everything(3, verbose=False)
    module = Dropped()
    make_trainer(build_strategy(strategy), 2).fit(module, batches("byte_gpt", 1, 1))
    return module.outside, module.inside


def test_stages_draw_alike_outside_of_layers_and_apart_inside(ranks: Any) -> None:
    (outside, first), (outside_of_last, last) = ranks(2).run(drawn, "pp_custom:schedule=gpipe")
    assert outside == outside_of_last
    assert len(set(outside)) == len(outside) == 4  # another number for each microbatch
    masks = [tuple(mask.tolist()) for mask in (*first[-8:], *last[-8:])]
    assert len(set(masks)) == 16


# Refusals -----------------------------------------------------------------------------------------------------------


class Conditioned(Deep):
    """Layers that take a second argument which an embedding computes."""

    def loss(self, tokens: Tensor) -> Tensor:
        hidden, extra = self.model.tokens(tokens), self.model.positions(tokens % 16)
        for block in self.model.blocks:
            hidden = block(hidden) if block is not self.model.blocks[3] else _Sum(block)(hidden, extra)
        return next_token_loss(self.model.head(self.model.norm(hidden)), tokens)


class _Sum:
    def __init__(self, block: nn.Module) -> None:
        self.block = block

    def __call__(self, hidden: Tensor, extra: Tensor) -> Tensor:
        return self.block(hidden) + extra


class Twice(Deep):
    def loss(self, tokens: Tensor) -> Tensor:
        return super().loss(tokens) + super().loss(tokens[:, :8])


class Skips(Deep):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)


class Penalty(Deep):
    """Reads the parameters of all layers in the loss."""

    def loss(self, tokens: Tensor) -> Tensor:
        return super().loss(tokens) + 1e-3 * sum(p.square().sum() for p in self.model.blocks.parameters())


def refusal(kind: str, strategy: str, num_ranks: int, batch: int) -> str:
    modules = {
        "conditioned": Conditioned,
        "twice": Twice,
        "skips": Skips,
        "penalty": Penalty,
        **PIPELINE_MODULES,
        **CASES,
    }
    try:
        loader = DataLoader(data_of(kind if kind in CASES else "byte_gpt", 4 * batch, batch), batch_size=batch)
        make_trainer(build_strategy(strategy), num_ranks).fit(modules[kind]("sgd"), loader)
    except ConfigurationError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "strategy", "batch", "words"),
    [
        ("gan", "pp_custom", 4, ["optimizes manually"]),
        ("lstm", "pp_custom", 4, ["pipeline=2", "LSTMModel has no stack"]),
        ("encoder_decoder", "pp_custom", 4, ["cuts one stack", "transformer.encoder.layers", "decoder"]),
        ("byte_gpt", "pp_custom:schedule=zbv", 4, ["has 3 layers, fewer than the 4 stages"]),
        ("deep", "pp_custom:schedule=2f2b", 4, ["schedule='2f2b' is unknown", "gpipe, 1f1b, interleaved"]),
        ("deep", "pp_custom:schedule=interleaved", 4, ["needs virtual_stages of at least 2"]),
        ("deep", "pp_custom:virtual_stages=2", 4, ["virtual_stages=2 with schedule='1f1b'", "interleaved"]),
        ("deep", "pp_custom:microbatches=1", 4, ["microbatches=1 are fewer than 2, which schedule='1f1b' needs"]),
        ("deep", "pp_custom:microbatches=3", 4, ["4 samples a rank", "microbatches=3", "possible: 2, 4"]),
        ("deep", "pp_custom", 7, ["7 samples a rank", "no divisor from 2 to 4"]),
        ("deep", "pp_custom:stages=[1,2]", 4, ["stages=[1, 2] are 3 layers, but model.blocks has 4"]),
        ("deep", "pp_custom:stages=[4]", 4, ["stages=[4] are 1 stages, but there are 2"]),
        ("deep", "pp_custom:stages=[4,0]", 4, ["at least 1"]),
        ("deep", "pp_custom:offload=all,optimizer_in_backward=true", 4, ["2 problems", "offload='all'"]),
        ("deep", "pp_custom:forward_methods=[model.forward]", 4, ["forward_methods=['model.forward']"]),
        ("conditioned", "pp_custom", 4, ["model.blocks.3", "only another pipeline stage", "model.positions.weight"]),
        ("twice", "pp_custom", 4, ["called model.blocks.0 after model.blocks.3"]),
        ("skips", "pp_custom", 4, ["training_step returns NoneType"]),
        ("penalty", "pp_custom", 4, ["uses model.blocks.0", "outside of the layer that owns it"]),
    ],
)
def test_what_cannot_be_pipelined_is_refused(
    ranks: Any, kind: str, strategy: str, batch: int, words: list[str]
) -> None:
    size = 4 if "context" in strategy else 2
    messages = ranks(size).run(refusal, kind, strategy, size, batch)
    assert all(messages), messages
    text = "\n".join(messages)
    assert [word for word in words if word not in text] == [], text


def test_balance() -> None:
    assert balanced(StepCosts((10,) * 8, 0, 0), 2) == (4, 4)
    assert balanced(StepCosts((10,) * 8, 40, 0), 2) == (2, 6)
    assert balanced(StepCosts((10,) * 6, 10, 30), 3) == (2, 3, 1)
    assert balanced(StepCosts((10, 10), 900, 0), 2) == (1, 1)


@pytest.mark.parametrize(("size", "expected"), [(8, 4), (12, 4), (6, 3), (2, 2)], ids=lambda value: str(value))
def test_number_of_microbatches(size: int, expected: int) -> None:
    policy = PipelinePolicy()
    assert policy.training_microbatches(size, 2) == expected
    assert [policy.any_microbatches(n, 2) for n in (1, 5, 7, 9)] == [1, 1, 1, 3]


def test_batches_are_cut_and_outputs_joined() -> None:
    batch = {"x": torch.arange(8).view(4, 2), "names": list("abcd"), "pair": (torch.arange(4), 7), "w": torch.ones(3)}
    first, second = cut_batch(batch, batch_size_of(batch), 2)
    assert first["names"] == ["a", "b"]
    assert second["x"].tolist() == [[4, 5], [6, 7]]
    assert second["pair"][0].tolist() == [2, 3]
    assert second["pair"][1] == 7
    assert second["w"] is batch["w"]
    rows = [torch.full((2, 1), float(i)) for i in (1, 2)]
    parts = [{"rows": row, "mean": row.mean(), "ids": [int(row[0])] * 2, "n": 3} for row in rows]
    merged = merge_outputs(parts, 2)
    assert merged["rows"].flatten().tolist() == [1, 1, 2, 2]
    assert (float(merged["mean"]), merged["ids"], merged["n"]) == (1.5, [1, 1, 2, 2], 3)
    with pytest.raises(ConfigurationError, match="differs from microbatch to microbatch"):
        merge_outputs([{"table": torch.ones(3, 3)}, {"table": torch.zeros(3, 3)}], 2)
    with pytest.raises(ConfigurationError, match="no tensor"):
        batch_size_of({"names": ["a"]})

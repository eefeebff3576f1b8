"""Layers whose arguments nobody can guess: their split is decided by the arguments of the first batch."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_parallel import Degrees, build_strategy, explain, full_state_dict
from lightning_parallel.module.layer_stacks import find_layers
from lightning_parallel.module.recorded_calls import LayerCall, RecordedCalls
from lightning_parallel.plan import build_plan
from lightning_parallel.policies import Policies
from lightning_parallel.strategies import planned_strategy
from lightning_parallel.techniques.tensor.plan import plan_tensor
from tests.data import batches
from tests.models.recorded_layers import RECORDED_MODULES, Settings, Swin, SwinBlock
from tests.parity import (
    BF16,
    TOLERANCE,
    assert_same_training,
    checked,
    difference,
    make_trainer,
    reference,
    train,
    worst,
)


@pytest.mark.parametrize("case", RECORDED_MODULES)
def test_two_ranks_share_each_layer(ranks: Any, case: str) -> None:
    found = ranks(2).run(train, case, "adamw", "tp_custom", 2, 1, norms=True)[0]
    assert_same_training(found, reference(case, norms=True))


def test_with_sharding(ranks: Any) -> None:
    """With the proof of the first step, which sees the split layers."""
    found = ranks(4).run(train, "swin", "adamw", checked("fsdp_tp_custom"), 4, 2, norms=True)[0]
    assert_same_training(found, reference("swin", norms=True))


def test_the_trial_changes_no_number(ranks: Any) -> None:
    """Ranks draw from streams of their own, so that the same split is what is equal, to the last bit."""
    plan = "tp_custom:tensor_plan={up: colwise, down: rowwise}"
    ours, theirs = (ranks(2).run(train, "settings", "adamw", name, 2, 1)[0] for name in ("tp_custom", plan))
    assert ours.losses == theirs.losses
    assert difference(ours.final, theirs.final) == 0.0


@pytest.mark.parametrize("options", ["recompute=full", "sequence=true", "compile=layers", "offload=optimizer"])
def test_policies(ranks: Any, options: str) -> None:
    found = ranks(2).run(train, "deberta", "adamw", f"tp_custom:{options}", 2, 1, steps=2)[0]
    assert worst(found, reference("deberta", steps=2)) < TOLERANCE


def test_accumulation(ranks: Any) -> None:
    kwargs: dict[str, Any] = {"accumulate_grad_batches": 2, "norms": True}
    ours = ranks(4).run(train, "swin", "adamw", "fsdp_tp_custom:accumulation_sync=last", 4, 2, **kwargs)[0]
    assert worst(ours, reference("swin", **kwargs)) < TOLERANCE


def test_mixed_precision(ranks: Any) -> None:
    ours = ranks(2).run(train, "swin", "adamw", "tp_custom", 2, 1, steps=2, precision="bf16-mixed")[0]
    theirs = reference("swin", steps=2, precision="bf16-mixed")
    assert ours.losses == pytest.approx(theirs.losses, abs=BF16)


def what_a_fit_does() -> dict[str, Any]:
    """How often a plan is made, which maps are split, and whether the module is plain again."""
    L.seed_everything(3, verbose=False)
    module, split = Settings("adamw"), []
    own = list(module.parameters())
    module.on_train_batch_end = lambda *_: split.append(  # type: ignore[method-assign]
        [name for name, p in module.named_parameters() if isinstance(p, DTensor)]
    )
    build = planned_strategy.build_plan
    trainer = make_trainer(build_strategy("tp_custom:check=off"), 2)
    with mock.patch.object(planned_strategy, "build_plan", side_effect=build) as built:
        trainer.fit(module, batches("settings", 1, 2))
    return {
        "plans": built.call_count,
        "steps": module.num_steps,
        "split": [len(each) for each in split],
        "same objects": all(a is b for a, b in zip(module.parameters(), own, strict=True)),
    }


def test_one_plan_one_trial_and_nothing_left_of_it(ranks: Any) -> None:
    for found in ranks(2).run(what_a_fit_does):
        # Of three layers, the weights of both maps and the bias of the first.
        assert found == {"plans": 1, "steps": 2, "split": [9, 9], "same objects": True}


def evaluated(strategy: str, num_ranks: int) -> tuple[float, int]:
    """The loss of an evaluation without a fit, and the number of split parameters in it."""
    L.seed_everything(3, verbose=False)
    module = Swin("adamw")
    split: list[int] = []
    module.on_validation_batch_end = lambda *_: split.append(  # type: ignore[method-assign]
        sum(isinstance(p, DTensor) for p in module.parameters())
    )
    trainer = make_trainer(build_strategy(strategy) if strategy != "auto" else "auto", num_ranks)
    (found,) = trainer.validate(module, batches("swin", 1, 2), verbose=False)
    return found["val_loss"], split[0]


def test_evaluation_alone(ranks: Any) -> None:
    expected, _ = evaluated("auto", 1)
    loss, number = ranks(2).run(evaluated, "tp_custom", 2)[0]
    assert loss == pytest.approx(expected, abs=TOLERANCE)
    assert number == 3 * 6


class ByHand(Swin):
    """Updates in its step, through Lightning's optimizer and past it, before anything is known of other steps."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        first = self.tokens(batch[0]).square().mean()
        self.manual_backward(first)
        optimizer.step()
        optimizer.zero_grad()
        loss = self.loss(*batch)
        self.manual_backward(loss)
        optimizer.step()
        return {"loss": loss.detach()}


def by_hand(strategy: str, num_ranks: int) -> dict[str, Tensor]:
    L.seed_everything(3, verbose=False)
    trainer = make_trainer(build_strategy(strategy) if strategy != "auto" else "auto", num_ranks)
    trainer.fit(ByHand("sgd"), batches("swin", 1, 2))
    return full_state_dict(trainer)


def test_a_step_that_updates_before_its_layers(ranks: Any) -> None:
    """The trial ends at the first update, so nothing is known of the layers, which is said."""
    with pytest.raises(Exception, match="no branch of linear maps was found"):
        ranks(2).run(by_hand, "tp_custom:check=off", 2)


def resumed(strategy: str, num_ranks: int, path: str) -> dict[str, Tensor]:
    """Two steps, a checkpoint, and two more steps by another fit."""
    for steps, before in ((2, None), (4, f"{path}/a.ckpt")):
        L.seed_everything(3, verbose=False)
        trainer = make_trainer(
            build_strategy(strategy) if strategy != "auto" else "auto", num_ranks, max_steps=steps, max_epochs=-1
        )
        trainer.fit(Swin("adamw"), batches("swin", 1, 4), ckpt_path=before)
        if before is None:
            trainer.save_checkpoint(f"{path}/a.ckpt")
    return full_state_dict(trainer)


def test_resumes_with_the_state_of_optimizers(ranks: Any, tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    expected = resumed("auto", 1, str(tmp_path / "plain"))
    assert difference(ranks(2).run(resumed, "tp_custom", 2, str(tmp_path))[0], expected) < TOLERANCE


# Without ranks ------------------------------------------------------------------------------------------------------


def test_under_a_pipeline_it_is_refused_at_once() -> None:
    plan = build_plan(Swin(), Degrees(tensor=2, pipeline=2).resolve(4), Policies())
    assert [violation[:54] for violation in plan.violations] == [
        "blocks.0 (SwinBlock) could not be run on hidden states"
    ]


def test_explain_says_that_the_first_step_decides() -> None:
    text = explain(make_trainer(build_strategy("tp_custom"), 2), Swin())
    assert "tensor parallel over 2 ranks, as the first step will show" in text
    assert "blocks.0 (SwinBlock) could not be run on hidden states" in text


def called(x: Any, **kwargs: Any) -> LayerCall:
    return LayerCall((x,), kwargs)


def test_the_roles_that_a_call_shows() -> None:
    module = Swin()
    structure = find_layers(module)
    before = plan_tensor(module, structure, None, degree=2)
    assert before.roles == {}
    assert before.violations == []
    assert [each.layers for each in before.unseen] == [("blocks.0", "blocks.1", "blocks.2")]
    found = plan_tensor(module, structure, None, degree=2, calls={"blocks.1": called(torch.zeros(2, 4, 4, 16))})
    assert found.violations == []
    assert found.unseen == ()
    roles = {"attention.qkv": "colwise", "attention.proj": "rowwise", "mlp.up": "colwise", "mlp.down": "rowwise"}
    assert [found.below(f"blocks.{index}") for index in range(3)] == [roles] * 3


class ReadsValues(SwinBlock):
    def __init__(self) -> None:
        super().__init__(0)

    def forward(self, x: Tensor, settings: Any = None) -> Tensor:
        if float(x.sum()) > 1e9:
            return x
        return super().forward(x * settings.scale)


def test_a_layer_that_reads_values_runs_where_its_arguments_are() -> None:
    module = nn.Sequential(ReadsValues(), ReadsValues())
    call = called(torch.zeros(2, 4, 4, 16), settings=SimpleNamespace(scale=torch.ones(())))
    found = plan_tensor(nn.ModuleDict({"net": module}), find_layers(nn.ModuleDict({"net": module})), None, degree=2,
                        calls={"net.0": call})  # fmt: skip
    assert found.violations == []
    assert len(found.roles) == 2 * 4


def test_what_stops_it_is_named() -> None:
    module = Swin()
    call = called(torch.zeros(2, 5, 5, 16), mask=None, kinds=(1, "a"))
    (violation,) = plan_tensor(module, find_layers(module), None, degree=2, calls={"blocks.0": call}).violations
    assert violation.startswith("blocks.0 (SwinBlock) could not be run on what the first step gives it, ")
    assert "([2, 5, 5, 16], mask=None, kinds=(1, 'a'))" in violation


def test_a_call_is_taken_before_hooks_and_ends_the_step() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
            self.ends = 0

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            self.ends += 1
            return x

    net = Net()
    net.layers[1].register_forward_pre_hook(lambda layer, args: (args[0] * 2,))
    with RecordedCalls(net, [["layers.1", "layers.2"]]) as calls:
        net(torch.ones(2, 4))
    assert list(calls.found) == ["layers.1"]
    assert torch.equal(calls.found["layers.1"].args[0], net.layers[0](torch.ones(2, 4)))
    assert net.ends == 0
    assert len(net.layers[1]._forward_pre_hooks) == 1
    net(torch.ones(2, 4))
    assert net.ends == 1


def test_a_copy_of_a_call_has_its_kinds() -> None:
    x, mask, flag = torch.zeros(2, 4), torch.zeros(4), torch.zeros(2, dtype=torch.long)
    cache = SimpleNamespace(update=None, get_seq_length=None)
    args, kwargs = LayerCall((flag, x, x), {"mask": mask, "cache": cache, "n": 3}).on(torch.device("meta"))
    assert args[1] is args[2]
    assert args[1].is_meta
    assert [args[0].requires_grad, args[1].requires_grad, kwargs["mask"].requires_grad] == [False, True, False]
    assert kwargs["cache"] is None
    assert kwargs["n"] == 3


def test_mixed_precision_casts_the_parameters_of_a_layer() -> None:
    call, meta = LayerCall((torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2)), {}), torch.device("meta")
    assert [value.dtype for value in call.on(meta, {torch.float32})[0]] == [torch.float32, torch.float32]
    assert [value.dtype for value in call.on(meta, {torch.bfloat16})[0]] == [torch.bfloat16, torch.float32]
    both = {torch.bfloat16, torch.float32}
    assert [value.dtype for value in call.on(meta, both)[0]] == [torch.bfloat16, torch.float32]

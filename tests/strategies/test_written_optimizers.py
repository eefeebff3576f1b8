"""Optimizers that people write, and callbacks that look into one: as in one process, or told what to use instead."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from lightning_parallel import full_state_dict
from lightning_parallel.strategies.shard_notes import add_shard_notes
from tests.data import batches
from tests.models.cases import ByteGPT
from tests.models.optimizers import Noisy, NoisyAndDropped, Normed, Preconditioned, Thaw, Wrapped
from tests.names import num_readers
from tests.parity import TOLERANCE, Outcome, Recorder, checked, difference, once, train_module, trainer_for, worst
from tests.rank_pool import RankError

SHARDED = ["fsdp_custom", "zero2_custom", "cp_custom"]
WHOLE = ["ddp_custom", "zero1_custom", "tp_custom", "pp_custom"]


def written(make: Any, strategy: str, num_ranks: int, **kwargs: Any) -> Outcome:
    return train_module(
        make, batches("byte_gpt", num_readers(strategy.partition(":")[0], num_ranks)), strategy, num_ranks, **kwargs
    )


@pytest.mark.parametrize("name", [*WHOLE, *SHARDED])
@pytest.mark.parametrize("make", [Preconditioned, Normed])
def test_what_torch_cannot_compute_with_parts_is_computed_with_whole_values(make: Any, name: str, ranks: Any) -> None:
    assert worst(ranks(2).run(written, make, name, 2)[0], once(written, make, "auto", 1)) < TOLERANCE


@pytest.mark.parametrize("name", ["ddp_custom", *SHARDED, "tp_custom"])
def test_an_optimizer_draws_for_whole_parameters(name: str, ranks: Any) -> None:
    assert worst(ranks(2).run(written, Noisy, name, 2)[0], once(written, Noisy, "auto", 1)) < TOLERANCE


def test_replicas_draw_alike_behind_dropout(ranks: Any) -> None:
    found = ranks(4).run(written, NoisyAndDropped, checked("hsdp_custom"), 4, deadline=60)
    assert found[0].final  # else, the ranks would have ended with what differs


@pytest.mark.parametrize("name", ["fsdp_custom", "zero1_custom", "pp_custom", "tp_custom"])
def test_wrappers_that_are_no_optimizers_are_refused(name: str, ranks: Any) -> None:
    with pytest.raises(RankError, match=r"Lookahead is an optimizer that has not called Optimizer.__init__"):
        ranks(2).run(written, Wrapped, name, 2, deadline=60)


def test_wrappers_run_where_all_is_whole(ranks: Any) -> None:
    assert worst(ranks(2).run(written, Wrapped, "ddp_custom", 2)[0], once(written, Wrapped, "auto", 1)) < TOLERANCE


def note_of(words: str) -> str:
    """What is said of an error of torch's in an update, such as one in a compiled function."""

    class Fails(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            raise RuntimeError(words)

    with pytest.raises(RuntimeError) as caught:
        Fails([torch.nn.Parameter(torch.ones(1))], lr=1.0).step()
    add_shard_notes(caught.value)
    return "".join(getattr(caught.value, "__notes__", ()))


def test_errors_of_optimizers_that_meet_shards_have_a_note() -> None:
    said = note_of("aten.mm.default: got mixed torch.Tensor and DTensor")
    assert "Fails at " in said
    assert "test_written_optimizers.py:" in said
    assert "Use zero1_custom" in said
    assert "gradient_clip_val" not in said  # it is no loss that reads them
    assert not note_of("out of memory")


def factored(strategy: str, num_ranks: int, file: str, resumed: str = "") -> Outcome:
    """An epoch, or the second one from a checkpoint; the optimizer keeps means of rows and of columns."""

    def make() -> ByteGPT:
        module = ByteGPT()
        module.configure_optimizers = lambda: torch.optim.Adafactor(  # type: ignore[method-assign]
            module.parameters(), lr=1e-3
        )
        return module

    L.seed_everything(3, verbose=False)
    trainer = trainer_for(strategy, num_ranks, max_epochs=2 if resumed else 1, callbacks=[recorder := Recorder()])
    trainer.fit(make(), batches("byte_gpt", 1, 3), ckpt_path=resumed or None)
    trainer.save_checkpoint(file)
    recorder.outcome.final = full_state_dict(trainer)
    return recorder.outcome


def test_each_stage_updates_its_parameters_by_adafactor(ranks: Any, tmp_path: Path) -> None:
    """A matrix is whole on its stage; the checkpoint has the means of all of them, for one process, too."""
    one, two, later = (str(tmp_path / name) for name in ("one.ckpt", "two.ckpt", "later.ckpt"))
    assert worst(ranks(2).run(factored, "pp_custom", 2, two)[0], factored("auto", 1, one)) < TOLERANCE
    states = [torch.load(file, weights_only=True)["optimizer_states"][0]["state"] for file in (one, two)]
    assert states[0].keys() == states[1].keys()
    for number, entries in states[0].items():
        assert difference(states[1][number], entries) < TOLERANCE
    again = factored("auto", 1, later, one)
    assert worst(ranks(2).run(factored, "pp_custom", 2, later, two)[0], again) < TOLERANCE
    assert worst(factored("auto", 1, later, two), again) < TOLERANCE


def thawing(strategy: str, num_ranks: int, has_twin: bool = False, readers: int = 0) -> Outcome:
    """Thaw layers in the second epoch, of which some have the values of a parameter that is trained, or of none."""

    def make() -> ByteGPT:
        module = ByteGPT()
        if has_twin:
            module.twin = torch.nn.Parameter(module.model.blocks[1].norm1.weight.detach().clone())
        module.configure_optimizers = lambda: torch.optim.AdamW(  # type: ignore[method-assign]
            [p for p in module.parameters() if p.requires_grad], 1e-2, eps=1e-4
        )
        return module

    loader = batches("byte_gpt", readers or num_readers(strategy, num_ranks), 2)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*already")
        return train_module(make, loader, strategy, num_ranks, watching=[Thaw()], max_epochs=3)


@pytest.mark.parametrize("name", ["ddp_custom", "fsdp_custom", "tp_custom", "cp_custom", "pp_custom"])
def test_layers_that_a_callback_thaws(ranks: Any, name: str) -> None:
    """Lightning compares each parameter with all of the optimizer's, of which some are whole and some are shards."""
    assert worst(ranks(2).run(thawing, name, 2)[0], once(thawing, "auto", 1)) < TOLERANCE


def test_a_layer_that_equals_what_is_trained_stays_frozen_on_each_stage(ranks: Any) -> None:
    """Lightning takes equal values for the same parameter; so do stages that hold one of the two."""
    alone, plain = once(thawing, "auto", 1, True), once(thawing, "auto", 1)
    assert (alone.final["model.blocks.0.norm1.weight"] == 1).all()
    assert (plain.final["model.blocks.0.norm1.weight"] != 1).any()
    for name, size, readers in (("pp_custom", 2, 1), ("fsdp_custom:pipeline=2,shard=2", 4, 2)):
        assert worst(ranks(size).run(thawing, name, size, True, readers)[0], alone) < TOLERANCE

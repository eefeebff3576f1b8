"""What hooks read of optimizers' states: as in one process, or refused in words where other ranks keep a part."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from lightning_parallel import build_strategy, full_state_dict
from tests.data import GLOBAL_BATCH, loader_of
from tests.models import state_habits as habits
from tests.names import num_readers
from tests.parity import TOLERANCE, difference, make_trainer, once
from tests.rank_pool import RankError


def fitted(make: Any, strategy: str, num_ranks: int, file: str = "") -> tuple[list[float], dict[str, Any]]:
    """What hooks have seen, and the weights; a checkpoint if there is a name for it."""
    L.seed_everything(3, verbose=False)
    module = make()
    trainer = make_trainer(strategy if strategy == "auto" else build_strategy(strategy), num_ranks)
    readers = num_readers(strategy.partition(":")[0], num_ranks)
    trainer.fit(module, loader_of("byte_gpt", steps=3, global_batch=GLOBAL_BATCH, num_ranks=readers))
    if file:
        trainer.save_checkpoint(file)
    return module.seen, full_state_dict(trainer)


PART = (
    r"at .*state_habits\.py:\d+ reads the state of AdamW, but under {}.*trainer\.strategy\.optimizer_state\(optimizer\)"
)
WHERE = {"zero1_custom": "ZeRO", "pp_custom": "a pipeline"}
REFUSED = (
    (habits.MomentNorms, r"state\[parameter\]\['exp_avg'\] "),
    (habits.AllStates, r"state\.values\(\) "),
    (habits.SavingState, r"state_dict\(\) "),
    (habits.AskingForState, r"'exp_avg' in state\[parameter\] "),
)


@pytest.mark.parametrize("strategy", WHERE)
@pytest.mark.parametrize(("make", "read"), REFUSED, ids=lambda value: getattr(value, "__name__", ""))
def test_a_part_is_refused(ranks: Any, make: Any, read: str, strategy: str) -> None:
    with pytest.raises(RankError) as caught:
        ranks(2).run(fitted, make, strategy, 2, deadline=20)
    assert re.search(read + PART.format(WHERE[strategy]), str(caught.value)), str(caught.value)


@pytest.mark.parametrize(
    ("make", "strategy"),
    [
        (habits.MomentNorms, "ddp_custom"),
        (habits.MomentNorms, "fsdp_custom"),
        (habits.AllStates, "fsdp_custom"),
        (habits.SaferState, "zero1_custom"),
        (habits.SaferState, "pp_custom"),
        (habits.KeepingInState, "zero1_custom"),
        (habits.KeepingInState, "pp_custom"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_equal_to_one_process(ranks: Any, make: Any, strategy: str) -> None:
    seen, weights = once(fitted, make, "auto", 1)
    found = ranks(2).run(fitted, make, strategy, 2)
    assert found[0][0] == pytest.approx(seen, abs=TOLERANCE, rel=TOLERANCE)
    assert difference(found[0][1], weights) <= TOLERANCE


@pytest.mark.parametrize("strategy", WHERE)
def test_checkpoints_have_the_states_of_the_ranks_that_keep_them(ranks: Any, strategy: str, tmp_path: Path) -> None:
    """Whatever hooks have put beside them elsewhere."""
    files = [str(tmp_path / name) for name in ("one.ckpt", "two.ckpt")]
    fitted(habits.KeepingInState, "auto", 1, files[0])
    ranks(2).run(fitted, habits.KeepingInState, strategy, 2, files[1])
    one, two = (torch.load(file, weights_only=True)["optimizer_states"][0]["state"] for file in files)
    assert one.keys() == two.keys()
    for number, entries in one.items():
        assert difference(two[number], entries) <= TOLERANCE

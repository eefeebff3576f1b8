"""Steps that give the stack views of samples, or samples in another order, under a pipeline."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_parallel import full_state_dict
from lightning_parallel.strategies.sample_order import order_of
from lightning_parallel.techniques.pipeline.joined import JoinedOutputs, RowOrder
from tests.data import batches
from tests.jobs.first_steps import said
from tests.models import views
from tests.parity import TOLERANCE, difference, trainer_for
from tests.rank_pool import RankError

TURNS = "the step gives the stack other rows, or another order of them"
Outcome = tuple[dict[str, Tensor], float, list[list[float]], list[str]]


def fitted(make: Any, strategy: str, num_ranks: int, readers: int = 1) -> Outcome:
    """Weights, the loss of validation, the rows that steps have returned, and what is said of turns."""
    L.seed_everything(3, verbose=False)
    module, loader = make(), batches("byte_gpt", readers)
    with said(TURNS) as lines:
        trainer = trainer_for(strategy, num_ranks, max_epochs=1, num_sanity_val_steps=0)
        trainer.fit(module, loader, loader)
    rows = [row.tolist() for row in module.returned]
    return full_state_dict(trainer), float(trainer.callback_metrics["val_loss"]), rows, lines


def assert_equal(found: Outcome, one: Outcome) -> None:
    assert difference(found[0], one[0]) <= TOLERANCE
    assert found[1] == pytest.approx(one[1], rel=1e-4)
    assert len(found[2]) == len(one[2])
    for own, other in zip(found[2], one[2], strict=True):
        assert own == pytest.approx(other, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(
    "strategy",
    [
        "pp_custom",
        "pp_custom:loss=batch",
        "pp_custom:schedule=interleaved,virtual_stages=2",
        "pp_custom:microbatches=8",
    ],
)
@pytest.mark.parametrize("make", [views.TwoViews, views.Contrast, views.ThreeViews, views.Beside])
def test_rows_of_views_stand_where_one_process_has_them(make: Any, strategy: str, ranks: Any) -> None:
    found = ranks(2).run(fitted, make, strategy, 2, deadline=60)
    assert_equal(found[0], fitted(make, "auto", 1))
    assert found[0][2] == found[1][2]
    assert not found[0][3]


def test_means_over_microbatches(ranks: Any) -> None:
    """Nothing is joined, but for what the step returns."""
    found = ranks(2).run(fitted, views.TwoViews, "pp_custom:loss=microbatch", 2, deadline=60)
    one = fitted(views.TwoViews, "auto", 1)
    assert difference(found[0][0], one[0]) <= TOLERANCE
    for own, other in zip(found[0][2], one[2], strict=True):
        assert own == pytest.approx(other, rel=1e-4, abs=1e-6)


def test_in_a_product(ranks: Any) -> None:
    found = ranks(4).run(fitted, views.TwoViews, "fsdp_custom:shard=2,pipeline=2", 4, 2, deadline=60)
    assert difference(found[0][0], fitted(views.TwoViews, "auto", 1)[0]) <= TOLERANCE


@pytest.mark.parametrize("strategy", ["pp_custom", "pp_custom:loss=batch"])
@pytest.mark.parametrize("make", [views.Reversed, views.Sorted, views.Some])
def test_stages_take_turns_where_nobody_knows_the_order(make: Any, strategy: str, ranks: Any) -> None:
    found = ranks(2).run(fitted, make, strategy, 2, deadline=60)
    assert_equal(found[0], fitted(make, "auto", 1))
    assert any("take turns" in line for line in found[0][3]), found[0][3]


def test_other_numbers_of_rows_have_no_microbatches(ranks: Any) -> None:
    with pytest.raises(RankError, match=r"a microbatch gives the next stage .* of shape \[\d, 16, 16\]"):
        ranks(2).run(fitted, views.Some, "pp_custom:loss=microbatch", 2, deadline=60)


def longer(make: Any, strategy: str, num_ranks: int) -> list[str]:
    """Two epochs of five steps; what is said of turns."""
    L.seed_everything(3, verbose=False)
    with said(TURNS) as lines:
        trainer_for(strategy, num_ranks, max_epochs=2, limit_val_batches=0).fit(make(), batches("byte_gpt", 1))
    return lines


@pytest.mark.parametrize("strategy", ["pp_custom", "pp_custom:loss=batch"])
def test_orders_that_change_are_found(strategy: str, ranks: Any) -> None:
    with pytest.raises(RankError, match=r"rows for each sample|differs from microbatch to microbatch"):
        ranks(2).run(longer, views.LateViews, strategy, 2, deadline=60)
    lines = ranks(2).run(longer, views.LateSorted, strategy, 2, deadline=60)[0]
    assert any("(in batch 4, and not before)" in line for line in lines), lines


def two_loaders(strategy: str, num_ranks: int) -> None:
    loader = batches("byte_gpt", 1)
    trainer_for(strategy, num_ranks, max_epochs=1).fit(views.OfLoaders(), loader, [loader, loader])


def test_another_loader_with_other_rows_is_refused(ranks: Any) -> None:
    with pytest.raises(RankError, match="the layers return 2 rows for each sample, and returned 1 in a batch before"):
        ranks(2).run(two_loaders, "pp_custom", 2, deadline=60)


def validated(strategy: str, num_ranks: int) -> float:
    """The loss of a validation whose first batch is a single sample, which cannot be cut."""
    L.seed_everything(3, verbose=False)
    rows = batches("byte_gpt", 1).dataset
    loader = DataLoader(rows, batch_sampler=[[0], list(range(8))])  # type: ignore[arg-type]
    trainer = trainer_for(strategy, num_ranks)
    return trainer.validate(views.ThreeViews(), loader, verbose=False)[0]["val_loss"]


def test_a_first_batch_that_cannot_be_cut(ranks: Any) -> None:
    assert ranks(2).run(validated, "pp_custom", 2, deadline=60) == pytest.approx([validated("auto", 1)] * 2, rel=1e-4)


def cut(rows: Tensor, size: int = 2) -> list[Tensor]:
    return list(rows.split(size))


def test_orders() -> None:
    rows = torch.randn(8, 3, 5)
    other = torch.randn(8, 3, 5)
    pairs = [torch.cat(pair) for pair in zip(cut(rows), cut(other), strict=True)]
    assert order_of(rows, cut(rows), 2) == (1, 0, 0, 1)
    assert order_of(torch.cat([rows, other]), pairs, 2) == (2, 1, 0, 1)
    assert order_of(torch.cat([rows, other]) + 1e-5, pairs, 2) == (2, 1, 0, 1)  # rounding
    assert order_of(torch.cat(pairs), pairs, 2) == (2, 0, 0, 1)
    assert order_of(rows.flip(0), cut(rows), 2) == (1, 0, 1, 1)
    assert order_of(rows, [*cut(rows)[:3], rows[6:7]], 2) == (1, 0, 1, 1)
    # Such as those that statistics of the batch change: the proof of the first step looks at them.
    assert order_of(other, cut(rows), 2) == (1, 0, 0, 1)
    # Samples along the second dimension.
    assert order_of(torch.cat([rows, other]).movedim(0, 1), [pair.movedim(0, 1) for pair in pairs], 2) == (2, 1, 0, 1)


def test_what_rows_have_in_common_says_nothing_of_their_order() -> None:
    rows = 300 + torch.randn(8, 5)
    other = rows + 0.5 * torch.linspace(-1, 1, 5)
    pairs = [torch.cat(pair) for pair in zip(cut(rows), cut(other), strict=True)]
    assert order_of(torch.cat([rows, other]), pairs, 2) == (2, 1, 0, 1)
    assert order_of(rows.flip(0), cut(rows), 2) == (1, 0, 1, 1)
    alike = torch.ones(8, 5)
    assert order_of(alike, cut(alike), 2) == (1, 0, 0, 0)  # nothing is settled
    some = [rows[0:1], rows[2:3]]
    assert order_of(torch.cat(some), some, 2) == (1, 0, 0, 1)  # one row of two samples each, in order


def test_gradients_of_views_go_back_to_their_microbatches() -> None:
    parts = [(torch.arange(4.0 * n, 4.0 * n + 4)[:, None].requires_grad_(),) for n in range(2)]
    joined = JoinedOutputs(parts, order=RowOrder(2, in_views=True), part_size=2)
    rows = joined.in_place_of(torch.empty(8, 1), "layer")
    assert rows.flatten().tolist() == [0, 1, 4, 5, 2, 3, 6, 7]
    (rows.flatten() * torch.arange(8.0)).sum().backward()
    gradients = [each for part in joined.gradients() for each in part if each is not None]
    assert [each.flatten().tolist() for each in gradients] == [[0, 1, 4, 5], [2, 3, 6, 7]]

"""The audit at the end of the one page: no parameter is forgotten without a word."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from lightning_parallel.techniques.sharding import ShardingPlan, plan_sharding
from tests.jobs.fits import fit_module, messages
from tests.models.cases import ByteGPT


def forgetful(strategy: str) -> list[str]:
    """What a fit is refused with where the plan has lost the unit of all that is in no layer."""

    def plan(*args: Any, **kwargs: Any) -> ShardingPlan:
        found = plan_sharding(*args, **kwargs)
        return ShardingPlan(tuple(path for path in found.units if path), found.whole)

    with mock.patch("lightning_parallel.plan.plan_sharding", plan):
        return messages(fit_module, ByteGPT, strategy, 2)


@pytest.mark.parametrize("name", ["fsdp_custom", "zero2_custom"])
def test_parameters_that_nobody_reduces_are_refused(ranks: Any, name: str) -> None:
    for found in ranks(2).run(forgetful, name):
        assert len(found) == 1
        assert "5 trainable parameters are neither sharded nor averaged" in found[0]
        assert "model.tokens.weight" in found[0]

"""What is set up beside the plan."""

from __future__ import annotations

from unittest import mock

import pytest
from torch import nn

from lightning_parallel.strategies.parallel_module import count_samples_once

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(("with_parts", "of_readers"), [((), ["0", "1.0"]), (("1",), ["0"])])
def test_statistics_count_samples_once(with_parts: tuple[str, ...], of_readers: list[str]) -> None:
    """On the host torch has no synchronized BatchNorm: the ranks that one asks are all that can be looked at."""
    module = nn.Sequential(nn.SyncBatchNorm(2), nn.Sequential(nn.SyncBatchNorm(2)))
    readers = mock.Mock()
    count_samples_once(module, readers, with_parts)
    asked = {name: layer.process_group for name, layer in module.named_modules() if isinstance(layer, nn.SyncBatchNorm)}
    assert [name for name, group in asked.items() if group is readers] == of_readers
    assert all(group is None for name, group in asked.items() if name not in of_readers)

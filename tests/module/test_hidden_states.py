"""Hidden states among the arguments of a layer."""

from __future__ import annotations

import torch

from lightning_parallel.module.hidden_states import take_hidden


def test_hidden_states_under_two_names() -> None:
    hidden = torch.zeros(2)
    assert take_hidden((), {"scale": 2, "x": hidden, "first": hidden}) == (hidden, (), {"scale": 2, "first": hidden})
    assert take_hidden((hidden, 3), {"first": hidden}) == (hidden, (3,), {"first": hidden})

"""Optimizers with state in 8 bits, in tensors that are made of others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torchao.optim import AdamW8bit

from lightning_parallel import ConfigurationError, full_state_dict
from tests.data import batches
from tests.models.cases import GPT, ByteGPT
from tests.names import num_readers
from tests.parity import difference, trainer_for


class Wide(ByteGPT):
    """Wide enough for moments in 8 bits, which begin at 4096 values."""

    def __init__(self) -> None:
        super().__init__("sgd")
        self.model = GPT(width=64, depth=2)

    def configure_optimizers(self) -> Any:
        return AdamW8bit(self.parameters(), lr=1e-2)


def trained(strategy: str, epochs: int, path: str, *, resumes: bool = False) -> dict[str, Tensor]:
    """The weights after some epochs, the last of which is saved, or of a run that goes on from there."""
    torch.manual_seed(3)
    trainer = trainer_for(strategy, 2, max_epochs=epochs)
    loader = batches("byte_gpt", num_readers(strategy, 2), 2)
    given = {"ckpt_path": path, "weights_only": False} if resumes else {}
    with torch.compiler.set_stance("force_eager"):
        trainer.fit(Wide(), loader, **given)  # type: ignore[arg-type]
    if not resumes:
        trainer.save_checkpoint(path)
    return full_state_dict(trainer)


def refusal(strategy: str, path: str) -> str:
    try:
        trained(strategy, 2, path, resumes=True)
    except ConfigurationError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("strategy", ["ddp_custom", "ddp_custom:checkpoint=async-whole", "zero1_custom", "pp_custom"])
def test_a_run_resumes_with_its_state(ranks: Any, strategy: str, tmp_path: Path) -> None:
    path = str(tmp_path / "state.ckpt")
    pool = ranks(2)
    pool.run(trained, strategy, 1, path)
    resumed = pool.run(trained, strategy, 2, path, resumes=True)[0]
    whole = pool.run(trained, strategy, 2, str(tmp_path / "whole.ckpt"))[0]
    assert difference(resumed, whole) < 1e-6


def test_what_cannot_be_cut_again_is_refused_in_words(ranks: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "state.ckpt")
    ranks(2).run(trained, "fsdp_custom", 1, path)
    for message in ranks(2).run(refusal, "fsdp_custom", path):
        assert "optimizer state that is packed (torchao's OptimState8bit), which cannot be cut" in message

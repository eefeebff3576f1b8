"""Hidden states and other outputs that Hugging Face's models collect from their layers, some of which are elsewhere."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from lightning_parallel import full_state_dict
from tests.data import batches
from tests.models.cases import LENGTH, Case
from tests.models.hugging_face import HUGGING_FACE
from tests.parity import TOLERANCE, Outcome, Recorder, once, trainer_for, worst

NUM_LAYERS = 4


class Collecting(Case):
    """A penalty on one of the hidden states, of which there are as many as layers, and one more."""

    def __init__(self, state: int) -> None:
        super().__init__("adamw")
        from transformers import LlamaConfig, LlamaForCausalLM

        self.model = LlamaForCausalLM(
            LlamaConfig(
                **HUGGING_FACE, num_hidden_layers=NUM_LAYERS, num_key_value_heads=2, max_position_embeddings=LENGTH,
                pad_token_id=None,
            )
        )  # fmt: skip
        self.state = state

    def loss(self, tokens: Tensor) -> Tensor:
        found = self.model(input_ids=tokens, labels=tokens, output_hidden_states=True)
        assert len(found.hidden_states) == NUM_LAYERS + 1
        return found.loss + found.hidden_states[self.state].pow(2).mean()


def collected(strategy: str, num_ranks: int, state: int) -> tuple[Outcome, int, set[int]]:
    """A fit; then the number of states that the plain module returns, and of the hooks of each layer."""
    L.seed_everything(3, verbose=False)
    module, recorder = Collecting(state), Recorder()
    trainer = trainer_for(strategy, num_ranks, callbacks=[recorder])
    trainer.fit(module, batches("byte_gpt", 1))
    recorder.outcome.final = full_state_dict(trainer)
    model = module.model
    states = model(input_ids=torch.zeros(1, 4, dtype=torch.long), output_hidden_states=True).hidden_states
    return recorder.outcome, len(states), {len(layer._forward_hooks) for layer in model.model.layers}


@pytest.mark.parametrize("loss", ["auto", "batch", "microbatch"])
def test_the_last_hidden_state(ranks: Any, loss: str) -> None:
    theirs, *plain = once(collected, "auto", 1, -1)
    for ours, *after in ranks(2).run(collected, f"pp_custom:loss={loss}", 2, -1):
        assert ours.losses == pytest.approx(theirs.losses, abs=TOLERANCE)
        assert after == plain == [NUM_LAYERS + 1, {1}]


@pytest.mark.parametrize("state", [1, -2])
def test_another_hidden_state(ranks: Any, state: int) -> None:
    """One of another stage, and one of the last stage: the rest of the step takes what no layer is given."""
    theirs = once(collected, "auto", 1, state)[0]
    for loss in ("batch", "microbatch"):
        ours = ranks(2).run(collected, f"pp_custom:loss={loss}", 2, state)[0][0]
        assert worst(ours, theirs) < TOLERANCE

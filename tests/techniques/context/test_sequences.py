"""Context parallel: sequences split inside the stacks, and numbers equal to those of one process."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_parallel import ConfigurationError, build_strategy, full_state_dict
from lightning_parallel.callbacks import TokenWeighted
from lightning_parallel.module.hidden_states import Lengths
from tests.collectives import Collectives
from tests.data import GLOBAL_BATCH, STEPS, batches, ragged
from tests.jobs.sharing import counted, lifecycle
from tests.models.cases import CASES, ByteGPT
from tests.models.hugging_face import Llama
from tests.models.padded import Padded
from tests.models.tables import CONTEXT_MODULES
from tests.parity import TOLERANCE, Outcome, Recorder, difference, make_trainer, reference, train, worst


@pytest.mark.parametrize("case", CONTEXT_MODULES)
def test_sequences_over_two_ranks(ranks: Any, case: str) -> None:
    assert worst(ranks(2).run(train, case, "adamw", "cp_custom", 2, 1)[0], reference(case)) < TOLERANCE


@pytest.mark.parametrize(
    ("strategy", "readers"),
    [
        ("fsdp_custom:context=2", 2),
        ("fsdp_custom:context=4", 1),
        ("hsdp_custom:context=2,replicate=2", 2),
        ("zero2_custom:context=2", 2),
        ("cp_custom:recompute=full", 1),
        ("fsdp_custom:context=2,compile=layers", 2),
        ("fsdp_custom:context=2,recompute=selective,accumulation_sync=last", 2),
    ],
)
@pytest.mark.parametrize("case", ["odd_length", "bert", "encoder_decoder", "two_lengths"])
def test_products(ranks: Any, case: str, strategy: str, readers: int) -> None:
    if case == "encoder_decoder" and ("context=4" in strategy or strategy.startswith("cp_custom")):
        pytest.skip("it has two heads")
    assert worst(ranks(4).run(train, case, "adamw", strategy, 4, readers)[0], reference(case)) < TOLERANCE


def test_every_entry_point(ranks: Any) -> None:
    expected = lifecycle("auto", 1, 1)
    for ours in ranks(2).run(lifecycle, "cp_custom", 2, 1):
        for name in ("before", "test"):
            assert ours[name][0] == pytest.approx(expected[name][0], abs=TOLERANCE)
        assert ours["during"] == pytest.approx(expected["during"], abs=TOLERANCE)
        assert ours["norms"] == pytest.approx(expected["norms"], abs=TOLERANCE)
        assert torch.allclose(ours["predictions"], expected["predictions"], atol=TOLERANCE)
        assert ours["plain"]


def test_ranks_that_share_samples_count_once(ranks: Any) -> None:
    assert ranks(4).run(counted, "fsdp_custom:context=2", 4, 2) == [STEPS * GLOBAL_BATCH] * 4


def weighted(strategy: str, num_ranks: int, batch: int, weighs: bool) -> Outcome:
    L.seed_everything(3, verbose=False)
    recorder = Recorder()
    built = strategy if strategy == "auto" else build_strategy(strategy)
    callbacks = [TokenWeighted(), recorder] if weighs else [recorder]
    trainer = make_trainer(built, num_ranks, callbacks=callbacks)
    trainer.fit(Padded(), DataLoader(ragged(48), batch_size=batch))
    recorder.outcome.final = full_state_dict(trainer)
    return recorder.outcome


def test_token_exact_loss_stays_exact(ranks: Any) -> None:
    expected = weighted("auto", 1, 16, weighs=False)
    ours = ranks(4).run(weighted, "fsdp_custom:context=2", 4, 8, weighs=True)[0]
    assert difference(ours.final, expected.final) < TOLERANCE


def exchanges(num_ranks: int) -> int:
    """The all-to-alls of the forwards of the second step: three layers."""
    mode = Collectives()

    class Module(ByteGPT):
        def loss(self, tokens: Tensor) -> Tensor:
            if self.global_step != 1:
                return super().loss(tokens)
            with mode:
                return super().loss(tokens)

    make_trainer(build_strategy("cp_custom"), num_ranks).fit(Module(), batches("byte_gpt", 1, 3))
    return sum(number for (kind, _), number in mode.counts.items() if "alltoall" in kind.replace("_", ""))


def test_four_exchanges_a_layer(ranks: Any) -> None:
    assert ranks(2).run(exchanges, 2) == [4 * 3] * 2


class WithDropout(ByteGPT):
    """Notes the part of a mask that each layer draws, and one that is drawn outside of the stack."""

    def __init__(self) -> None:
        super().__init__()
        self.inside: list[Tensor] = []
        self.outside: list[Tensor] = []
        for block in self.model.blocks:
            block.register_forward_hook(lambda *_: None)
            block.mlp.append(_Noted(self.inside))

    def loss(self, tokens: Tensor) -> Tensor:
        self.outside.append(F.dropout(torch.ones(32)))
        return super().loss(tokens)


class _Noted(nn.Module):
    def __init__(self, noted: list[Tensor]) -> None:
        super().__init__()
        self.noted = noted

    def forward(self, x: Tensor) -> Tensor:
        mask = F.dropout(torch.ones(x.shape[1]), training=self.training)
        self.noted.append(mask)
        return x * mask[:, None]


def masks(strategy: str) -> tuple[Tensor, Tensor]:
    L.seed_everything(3, verbose=False)
    module = WithDropout()
    make_trainer(build_strategy(strategy), 2).fit(module, batches("byte_gpt", 1))
    return torch.stack(module.outside), torch.cat(module.inside[-3:])


@pytest.mark.parametrize("strategy", ["cp_custom", "cp_custom:recompute=full"])
def test_dropout_is_equal_outside_and_different_on_each_part(ranks: Any, strategy: str) -> None:
    (first_outside, first_inside), (second_outside, second_inside) = ranks(2).run(masks, strategy)
    assert torch.equal(first_outside, second_outside)
    assert not torch.equal(first_inside, second_inside)


class MixesPositions(ByteGPT):
    """Layers that mix positions outside of attention."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        for block in self.model.blocks:
            block.mlp.insert(0, _Mixing())


class _Mixing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + x.cumsum(1) / 10


class Eager(Llama):
    """Hugging Face's attention of plain matrix products."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.model.config._attn_implementation = "eager"


def refusal(kind: str, strategy: str, num_ranks: int) -> str:
    modules = {"mixes_positions": MixesPositions, "eager": Eager, "byte_gpt": ByteGPT, "lstm": CASES["lstm"]}
    try:
        make_trainer(build_strategy(strategy), num_ranks).fit(modules[kind](), batches("byte_gpt", 1))
    except ConfigurationError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "strategy", "size", "words"),
    [
        ("mixes_positions", "cp_custom", 2, ["model.blocks.0 (Block)", "from position 8 of 16", "context=1"]),
        ("eager", "cp_custom", 2, ["attn_implementation='sdpa'"]),
        ("byte_gpt", "cp_custom", 4, ["context=4 cannot share 2 heads", "possible: 1, 2"]),
        ("lstm", "cp_custom", 2, ["context=2", "LSTMModel has no stack"]),
    ],
)
def test_what_cannot_be_split_is_refused(ranks: Any, kind: str, strategy: str, size: int, words: list[str]) -> None:
    message = ranks(size).run(refusal, kind, strategy, size)[0]
    assert [word for word in words if word not in message] == [], message


def test_lengths_are_told_apart() -> None:
    lengths = Lengths(2)
    assert [lengths.add(n) for n in (16, 16, 15, 7)] == [8, 8, 9, 4]
    assert lengths.whole == {8: 16, 9: 15, 4: 7}

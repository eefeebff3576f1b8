"""Context parallel: sequences split inside the stacks, and numbers equal to those of one process."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_parallel import ConfigurationError, build_strategy, full_state_dict
from lightning_parallel.callbacks import ExponentialMovingAverage, GlobalBatch, GradientNorm, TokenWeighted
from lightning_parallel.module.hidden_states import Lengths
from tests.callbacks.test_token_weighted import Padded, ragged
from tests.collectives import Collectives
from tests.models.cases import CASES, LENGTH, VOCABULARY, ByteGPT, Case, data_of
from tests.parity import GLOBAL_BATCH, STEPS, TOLERANCE, Outcome, Recorder, is_moving, make_trainer, worst

HUGGING_FACE = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4}


class Llama(Case):
    """Rotary positions from outside of the layers, and fewer heads of keys and values."""

    def __init__(self, optimizer: str = "adamw", kv_heads: int = 2) -> None:
        super().__init__(optimizer)
        from transformers import LlamaConfig, LlamaForCausalLM

        self.model = LlamaForCausalLM(
            LlamaConfig(
                **HUGGING_FACE, num_hidden_layers=3, num_key_value_heads=kv_heads, max_position_embeddings=LENGTH,
                pad_token_id=None,
            )
        )  # fmt: skip

    def loss(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens, labels=tokens).loss


class OneKeyHead(Llama):
    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer, kv_heads=1)


class OddLength(Llama):
    """A length that no number of ranks divides."""

    def loss(self, tokens: Tensor) -> Tensor:
        return super().loss(tokens[:, :13])


class Bert(Case):
    """Attention in both directions, with padding."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        from transformers import BertConfig, BertForMaskedLM

        self.model = BertForMaskedLM(
            BertConfig(
                **HUGGING_FACE, num_hidden_layers=2, max_position_embeddings=LENGTH, hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
            )
        )  # fmt: skip

    def loss(self, tokens: Tensor) -> Tensor:
        mask = (torch.arange(LENGTH) < 11 + tokens[:, :1] % 5).long()
        return self.model(input_ids=tokens, attention_mask=mask, labels=tokens).loss


class ViT(Case):
    """17 positions: 16 patches and a class token."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        from transformers import ViTConfig, ViTForImageClassification

        self.model = ViTForImageClassification(
            ViTConfig(
                image_size=8, patch_size=2, num_channels=1, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
                num_attention_heads=4, num_labels=10, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
            )
        )  # fmt: skip

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.model(pixel_values=images).logits, labels)


class Encoder(Case):
    """torch's own layers; the sequence is the second dimension, or the first."""

    def __init__(self, optimizer: str = "adamw", batch_first: bool = True) -> None:
        super().__init__(optimizer)
        self.tokens = nn.Embedding(VOCABULARY, 16)
        self.batch_first = batch_first
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(16, VOCABULARY)

    def loss(self, tokens: Tensor) -> Tensor:
        tokens = tokens if self.batch_first else tokens.t()
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        hidden = self.encoder(self.tokens(tokens), mask=mask, is_causal=True)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), tokens.flatten())


class SequenceFirst(Encoder):
    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer, batch_first=False)


class PaddedEncoder(Encoder):
    def loss(self, tokens: Tensor) -> Tensor:
        padding = torch.arange(LENGTH) >= 10 + tokens[:, :1] % 5
        hidden = self.encoder(self.tokens(tokens), src_key_padding_mask=padding)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), tokens.flatten())


class TwoLengths(Llama):
    """Two forwards of different lengths before one backward, which have the same part of two ranks."""

    def loss(self, tokens: Tensor) -> Tensor:
        return super().loss(tokens[:, :15]) + super().loss(tokens)


MODULES: dict[str, type[Case]] = {
    "llama": Llama,
    "one_key_head": OneKeyHead,
    "odd_length": OddLength,
    "bert": Bert,
    "vit": ViT,
    "encoder": Encoder,
    "sequence_first": SequenceFirst,
    "padded_encoder": PaddedEncoder,
    "two_lengths": TwoLengths,
    **{
        name: CASES[name]
        for name in (
            "byte_gpt", "bare_parameter", "hf_gpt2", "frozen_lora", "parameter_groups", "other_method",
            "configure_model", "encoder_decoder", "varying_length",
        )
    },
}  # fmt: skip


def batches(case: str, num_readers: int, steps: int = STEPS) -> DataLoader[Any]:
    known = {"vit": "conv_net"}.get(case, case if case in CASES else "byte_gpt")
    dataset: Dataset[Any] = data_of(known, steps * GLOBAL_BATCH, GLOBAL_BATCH)
    return DataLoader(dataset, batch_size=GLOBAL_BATCH // num_readers)


def train(case: str, strategy: str, num_ranks: int, num_readers: int, **kwargs: Any) -> Outcome:
    """Five steps of one module; `num_readers` ranks read different samples."""
    L.seed_everything(3, verbose=False)
    recorder = Recorder()
    built = strategy if strategy == "auto" else build_strategy(strategy)
    trainer = make_trainer(built, num_ranks, callbacks=[recorder], gradient_clip_val=0.5, **kwargs)
    trainer.fit(MODULES[case]("adamw"), batches(case, num_readers))
    recorder.outcome.final = full_state_dict(trainer)
    return recorder.outcome


@pytest.mark.parametrize("case", MODULES)
def test_sequences_over_two_ranks(ranks: Any, case: str) -> None:
    expected = train(case, "auto", 1, 1)
    assert is_moving(expected)
    assert worst(ranks(2).run(train, case, "cp_custom", 2, 1)[0], expected) < TOLERANCE


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
    expected = train(case, "auto", 1, 1)
    assert worst(ranks(4).run(train, case, strategy, 4, readers)[0], expected) < TOLERANCE


def lifecycle(strategy: str, num_ranks: int, num_readers: int) -> dict[str, Any]:
    """Validate, fit with validation, test and predict with the same objects, and callbacks that count samples."""
    L.seed_everything(3, verbose=False)
    module = ByteGPT("adamw")
    norms: list[float] = []

    class Norms(L.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            norms.append(float(trainer.callback_metrics["grad_norm"]))

    built = strategy if strategy == "auto" else build_strategy(strategy)
    callbacks = [GlobalBatch(GLOBAL_BATCH), GradientNorm(), ExponentialMovingAverage(0.5), Norms()]
    trainer = make_trainer(built, num_ranks, num_sanity_val_steps=1, callbacks=callbacks)
    loader = batches("byte_gpt", num_readers)
    found: dict[str, Any] = {"before": trainer.validate(module, loader, verbose=False)}
    trainer.fit(module, loader, loader)
    found["during"] = {name: float(value) for name, value in trainer.callback_metrics.items()}
    found["test"] = trainer.test(module, loader, verbose=False)
    found["predictions"] = torch.stack(trainer.predict(module, loader))
    found["norms"] = norms
    found["plain"] = type(module.model.blocks[0]).__module__ == "tests.models.cases"
    return found


def test_every_entry_point(ranks: Any) -> None:
    expected = lifecycle("auto", 1, 1)
    for ours in ranks(2).run(lifecycle, "cp_custom", 2, 1):
        for name in ("before", "test"):
            assert ours[name][0] == pytest.approx(expected[name][0], abs=TOLERANCE)
        assert ours["during"] == pytest.approx(expected["during"], abs=TOLERANCE)
        assert ours["norms"] == pytest.approx(expected["norms"], abs=TOLERANCE)
        assert torch.allclose(ours["predictions"], expected["predictions"], atol=TOLERANCE)
        assert ours["plain"]


class CountsSamples(ByteGPT):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("samples", float(len(batch[0])), sync_dist=True, reduce_fx="sum", on_epoch=True, on_step=False)
        return super().training_step(batch, batch_idx)


def counted(strategy: str, num_ranks: int, num_readers: int) -> float:
    trainer = make_trainer(build_strategy(strategy), num_ranks)
    trainer.fit(CountsSamples(), batches("byte_gpt", num_readers))
    return float(trainer.callback_metrics["samples"])


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
    assert max((ours.final[k] - expected.final[k]).abs().max() for k in expected.final) < TOLERANCE


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

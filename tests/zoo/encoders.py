"""Models of transformers that read a text, and those that read one and write another."""

from __future__ import annotations

from typing import Any

from tests.zoo.registry import of
from tests.zoo.steps import CLASSES, LENGTH, VOCABULARY, LanguageModel, PaddedModel, TextClassifier, Translation

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 2 * LENGTH,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "pad_token_id": 0,
}
"""What most configurations call so, without dropout: ranks draw other numbers."""


def encoder(family: str, head: str, **settings: Any) -> Any:
    """The model of a family with a head, such as ``"ForMaskedLM"``."""
    import transformers

    config = getattr(transformers, f"{family}Config")(**settings)
    return getattr(transformers, family + head)(config)


@of("transformers")
def bert() -> LanguageModel:
    return PaddedModel(encoder("Bert", "ForMaskedLM", **SIZES))


@of("transformers")
def bert_classifier() -> TextClassifier:
    return TextClassifier(encoder("Bert", "ForSequenceClassification", **SIZES, num_labels=CLASSES))


@of("transformers")
def roberta() -> LanguageModel:
    return PaddedModel(encoder("Roberta", "ForMaskedLM", **SIZES))


@of("transformers")
def deberta_v2() -> LanguageModel:
    positions = {"relative_attention": True, "position_buckets": 8, "pos_att_type": ["p2c", "c2p"]}
    return LanguageModel(encoder("DebertaV2", "ForMaskedLM", **SIZES, **positions, legacy=True))


@of("transformers")
def albert() -> LanguageModel:
    return PaddedModel(encoder("Albert", "ForMaskedLM", **SIZES, embedding_size=16, classifier_dropout_prob=0.0))


@of("transformers")
def electra() -> LanguageModel:
    return PaddedModel(encoder("Electra", "ForMaskedLM", **SIZES, embedding_size=16))


@of("transformers")
def distilbert() -> LanguageModel:
    sizes = {"vocab_size": VOCABULARY, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4}
    return PaddedModel(
        encoder(
            "DistilBert", "ForMaskedLM", **sizes, max_position_embeddings=LENGTH, dropout=0.0, attention_dropout=0.0
        )
    )


@of("transformers")
def modernbert() -> LanguageModel:
    return PaddedModel(
        encoder(
            "ModernBert", "ForMaskedLM", vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48,
            num_hidden_layers=4, num_attention_heads=4, max_position_embeddings=32, local_attention=8,
            global_attn_every_n_layers=2, pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1,
            sep_token_id=2, reference_compile=False,
        )
    )  # fmt: skip


@of("transformers")
def mpnet() -> LanguageModel:
    return PaddedModel(encoder("MPNet", "ForMaskedLM", **SIZES))


@of("transformers")
def fnet() -> LanguageModel:
    settings = {name: value for name, value in SIZES.items() if name != "attention_probs_dropout_prob"}
    return LanguageModel(encoder("FNet", "ForMaskedLM", **settings))


@of("transformers")
def t5() -> Translation:
    return Translation(
        encoder(
            "T5", "ForConditionalGeneration", vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2,
            num_heads=4, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0, use_cache=False,
        )
    )  # fmt: skip


WRITING: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 2 * LENGTH,
    "dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "use_cache": False,
}
"""Of encoders with a decoder."""


@of("transformers")
def bart() -> Translation:
    return Translation(encoder("Bart", "ForConditionalGeneration", **WRITING, forced_eos_token_id=2))


@of("transformers")
def marian() -> Translation:
    return Translation(encoder("Marian", "MTModel", **WRITING))


@of("transformers")
def pegasus() -> Translation:
    return Translation(encoder("Pegasus", "ForConditionalGeneration", **WRITING))

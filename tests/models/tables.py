"""Modules by name: those that a technique's tests go through, and all of them."""

from __future__ import annotations

import lightning as L

from tests.models.cases import CASES, REFUSED_CASES, Case
from tests.models.hugging_face import T5, Bert, Llama, Mixtral, OddLength, OneKeyHead, Qwen3, TwoLengths, ViT
from tests.models.layered import Demo, Encoder, Hard, PaddedEncoder, Pruned, Recurrences, SequenceFirst
from tests.models.pipelined import (
    Deep,
    DeepTied,
    FirstFrozen,
    HeadFirst,
    ReadsValues,
    Recurrent,
    ReturnsTuples,
    Transposed,
)
from tests.models.recorded_layers import RECORDED_MODULES, Falcon, Settings
from tests.models.stacked import STACKED_MODULES

CONTEXT_MODULES: dict[str, type[Case]] = {
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

TENSOR_MODULES: dict[str, type[Case]] = {
    **CONTEXT_MODULES,
    "t5": T5,
    "mixtral": Mixtral,
    "qwen3": Qwen3,
    "demo": Demo,
    "hard": Hard,
    "falcon": Falcon,
    "pruned": Pruned,
    "recurrences": Recurrences,
}

PIPELINE_MODULES: dict[str, type[Case]] = {
    **{
        name: cls
        for name, cls in CONTEXT_MODULES.items()
        if name not in ("two_lengths", "encoder_decoder", "one_key_head")
    },
    "deep": Deep,
    "deep_tied": DeepTied,
    "head_first": HeadFirst,
    "reads_values": ReadsValues,
    "first_frozen": FirstFrozen,
    "returns_tuples": ReturnsTuples,
    "mixtral": Mixtral,
    "recurrent": Recurrent,
    "transposed": Transposed,
}

MODULES: dict[str, type[L.LightningModule]] = {
    **CASES,
    **REFUSED_CASES,
    **TENSOR_MODULES,
    **PIPELINE_MODULES,
    **STACKED_MODULES,
    **RECORDED_MODULES,
    "settings": Settings,
}

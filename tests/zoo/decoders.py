"""Language models of transformers that predict each next token."""

from __future__ import annotations

from typing import Any

from tests.zoo.registry import of
from tests.zoo.steps import LENGTH, VOCABULARY, LanguageModel

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 2 * LENGTH,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""What most configurations call so."""

GROUPED: dict[str, Any] = {**SIZES, "num_key_value_heads": 2, "use_cache": False}
"""With fewer heads of keys and values."""


def language_model(family: str, config: str | None = None, **settings: Any) -> LanguageModel:
    """The model of a family for causal language modeling; `config` if its configuration has another name."""
    import transformers

    made = getattr(transformers, f"{config or family}Config")(**settings)
    return LanguageModel(getattr(transformers, f"{family}ForCausalLM")(made))


@of("transformers")
def gpt2() -> LanguageModel:
    import transformers

    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=4, embd_pdrop=0.0, attn_pdrop=0.0,
        resid_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    return LanguageModel(transformers.GPT2LMHeadModel(config))


@of("transformers")
def llama() -> LanguageModel:
    return language_model("Llama", **GROUPED)


@of("transformers")
def llama_eager() -> LanguageModel:
    return language_model("Llama", **GROUPED, attn_implementation="eager")


@of("transformers")
def qwen2() -> LanguageModel:
    return language_model("Qwen2", **GROUPED)


@of("transformers")
def qwen3() -> LanguageModel:
    return language_model("Qwen3", **GROUPED, head_dim=8)


@of("transformers")
def qwen3_moe() -> LanguageModel:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    return language_model("Qwen3Moe", **GROUPED, **experts, head_dim=8)


@of("transformers")
def mistral() -> LanguageModel:
    return language_model("Mistral", **GROUPED, head_dim=8, sliding_window=8)


@of("transformers")
def mixtral() -> LanguageModel:
    return language_model("Mixtral", **GROUPED, num_local_experts=4, num_experts_per_tok=2)


@of("transformers")
def gemma() -> LanguageModel:
    return language_model("Gemma", **GROUPED, head_dim=8)


@of("transformers")
def gemma2() -> LanguageModel:
    return language_model("Gemma2", **GROUPED, head_dim=8, sliding_window=8, query_pre_attn_scalar=8)


@of("transformers")
def phi() -> LanguageModel:
    return language_model("Phi", **SIZES, use_cache=False)


@of("transformers")
def phi3() -> LanguageModel:
    return language_model("Phi3", **GROUPED)


@of("transformers")
def stablelm() -> LanguageModel:
    return language_model("StableLm", **GROUPED)


@of("transformers")
def olmo2() -> LanguageModel:
    return language_model("Olmo2", **GROUPED)


@of("transformers")
def granite() -> LanguageModel:
    return language_model("Granite", **GROUPED)


@of("transformers")
def cohere() -> LanguageModel:
    return language_model("Cohere", **GROUPED)


@of("transformers")
def opt() -> LanguageModel:
    sizes = {**SIZES, "ffn_dim": SIZES["intermediate_size"], "word_embed_proj_dim": 32}
    del sizes["intermediate_size"]
    return language_model("OPT", **sizes, dropout=0.0, use_cache=False)


@of("transformers")
def bloom() -> LanguageModel:
    return language_model("Bloom", vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4, use_cache=False)


@of("transformers")
def falcon() -> LanguageModel:
    return language_model("Falcon", **SIZES, use_cache=False)


@of("transformers")
def gpt_neox() -> LanguageModel:
    return language_model("GPTNeoX", **SIZES, use_cache=False)


@of("transformers")
def gpt_neo() -> LanguageModel:
    return language_model(
        "GPTNeo", vocab_size=VOCABULARY, max_position_embeddings=LENGTH, hidden_size=32, num_layers=2, num_heads=4,
        attention_types=[[["global", "local"], 1]], window_size=8, resid_dropout=0.0, embed_dropout=0.0,
        attention_dropout=0.0, use_cache=False,
    )  # fmt: skip


@of("transformers")
def gptj() -> LanguageModel:
    return language_model(
        "GPTJ", vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=4, rotary_dim=4,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip


@of("transformers")
def deepseek_v3() -> LanguageModel:
    sizes = {**SIZES, "num_key_value_heads": 4, "use_cache": False}
    latent = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    return language_model(
        "DeepseekV3",
        **sizes,
        **latent,
        **experts,
        moe_intermediate_size=16,
        n_shared_experts=1,
        first_k_dense_replace=1,
    )


@of("transformers")
def mamba() -> LanguageModel:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2}
    return language_model("Mamba", **sizes, state_size=4, time_step_rank=4, use_cache=False, use_mambapy=False)


@of("transformers")
def mamba2() -> LanguageModel:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2}
    return language_model("Mamba2", **sizes, state_size=4, num_heads=4, head_dim=16, n_groups=2, use_cache=False)


@of("transformers")
def jamba() -> LanguageModel:
    hybrid = {"attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1, "expert_layer_period": 2}
    states = {"mamba_d_state": 4, "mamba_dt_rank": 4, "use_mamba_kernels": False}
    return language_model("Jamba", **{**GROUPED, "num_hidden_layers": 4}, **hybrid, **states, num_experts=2)


@of("transformers")
def rwkv() -> LanguageModel:
    return language_model(
        "Rwkv", vocab_size=VOCABULARY, context_length=LENGTH, hidden_size=32, num_hidden_layers=2, use_cache=False
    )

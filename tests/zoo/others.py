"""Sounds, images with texts, diffusion, and models of other packages."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.registry import of
from tests.zoo.steps import LENGTH, VOCABULARY, Custom, LanguageModel, Training, tokens_of


@of("transformers")
def whisper() -> Custom:
    import transformers

    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY, num_mel_bins=8, d_model=32, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48,
        max_source_positions=LENGTH, max_target_positions=LENGTH, dropout=0.0, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, decoder_start_token_id=3, suppress_tokens=[], begin_suppress_tokens=None, use_cache=False,
    )  # fmt: skip

    def draw(number: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        return torch.randn(number, 8, 2 * LENGTH, generator=generator), tokens_of(number, generator, 12)

    def loss(model: Any, sounds: Tensor, labels: Tensor) -> Tensor:
        return model(input_features=sounds, labels=labels).loss

    return Custom(transformers.WhisperForConditionalGeneration(config), draw, loss)


SOUND: dict[str, Any] = {
    "vocab_size": 16,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "conv_dim": [8, 8],
    "conv_kernel": [4, 4],
    "conv_stride": [4, 4],
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "feat_proj_dropout": 0.0,
    "final_dropout": 0.0,
    "layerdrop": 0.0,
    "apply_spec_augment": False,
    "pad_token_id": 0,
}


def recognizer(family: str) -> Custom:
    """Writes a text of five letters for each sound; the loss of each is divided by the length of all."""
    import transformers

    config = getattr(transformers, f"{family}Config")(**SOUND, ctc_loss_reduction="mean")
    built = getattr(transformers, f"{family}ForCTC")(config)

    def draw(number: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        sounds = torch.randn(number, 256, generator=generator)
        return sounds, torch.randint(1, 16, (number, 5), generator=generator)

    def loss(model: Any, sounds: Tensor, labels: Tensor) -> Tensor:
        return model(input_values=sounds, labels=labels).loss

    return Custom(built, draw, loss)


@of("transformers")
def wav2vec2() -> Custom:
    return recognizer("Wav2Vec2")


@of("transformers")
def hubert() -> Custom:
    return recognizer("Hubert")


def pairs_of(number: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    return tokens_of(number, generator), torch.randn(number, 3, 32, 32, generator=generator)


def pair_model(family: str) -> Custom:
    """Texts and images, each to be like its own: pairs with those of other samples would be others on each rank."""
    import transformers

    sizes: dict[str, Any] = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    }  # fmt: skip
    texts = {**sizes, "vocab_size": VOCABULARY, "max_position_embeddings": LENGTH, "eos_token_id": 2}
    images = {**sizes, "image_size": 32, "patch_size": 8}
    config = getattr(transformers, f"{family}Config")(text_config=texts, vision_config=images)

    def loss(model: Any, tokens: Tensor, images: Tensor) -> Tensor:
        output = model(input_ids=tokens, pixel_values=images)
        return 1 - F.cosine_similarity(output.text_embeds, output.image_embeds).mean()

    return Custom(getattr(transformers, f"{family}Model")(config), pairs_of, loss)


@of("transformers")
def clip() -> Custom:
    return pair_model("CLIP")


@of("transformers")
def siglip() -> Custom:
    return pair_model("Siglip")


@of("transformers")
def patchtst() -> Custom:
    """The next values of time series."""
    import transformers

    config = transformers.PatchTSTConfig(
        num_input_channels=2, context_length=32, patch_length=8, patch_stride=8, d_model=32, num_hidden_layers=2,
        num_attention_heads=4, ffn_dim=48, prediction_length=4, attention_dropout=0.0, ff_dropout=0.0,
        positional_dropout=0.0, path_dropout=0.0, head_dropout=0.0, norm_type="layernorm",
    )  # fmt: skip

    def draw(number: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        return torch.randn(number, 32, 2, generator=generator), torch.randn(number, 4, 2, generator=generator)

    def loss(model: Any, past: Tensor, future: Tensor) -> Tensor:
        return F.mse_loss(model(past_values=past).prediction_outputs, future)

    return Custom(transformers.PatchTSTForPrediction(config), draw, loss)


def noised_images(number: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    """Images, noise and a time for each; drawn once, since ranks draw other numbers."""
    images, noise = (torch.randn(number, 3, 16, 16, generator=generator) for _ in range(2))
    return images, noise, torch.randint(1000, (number,), generator=generator)


@of("diffusers")
def unet() -> Custom:
    from diffusers import DDPMScheduler, UNet2DModel

    built = UNet2DModel(
        sample_size=16, block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4, attention_head_dim=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    scheduler = DDPMScheduler()

    def loss(model: Any, images: Tensor, noise: Tensor, times: Tensor) -> Tensor:
        return F.mse_loss(model(scheduler.add_noise(images, noise, times), times).sample, noise)

    return Custom(built, noised_images, loss)


@of("diffusers")
def dit() -> Custom:
    from diffusers import DiTTransformer2DModel

    built = DiTTransformer2DModel(
        num_attention_heads=4, attention_head_dim=8, in_channels=3, num_layers=2, sample_size=16, patch_size=4,
        norm_num_groups=4, num_embeds_ada_norm=1000, dropout=0.0,
    )  # fmt: skip
    for part in built.modules():
        if hasattr(part, "dropout_prob"):
            part.dropout_prob = 0.0  # of labels; no argument sets it

    def loss(model: Any, images: Tensor, noise: Tensor, times: Tensor) -> Tensor:
        labels = times % 10
        return F.mse_loss(model(images + noise, timestep=times, class_labels=labels).sample, noise)

    return Custom(built, noised_images, loss)


@of("diffusers")
def flux() -> Custom:
    from diffusers import FluxTransformer2DModel

    built = FluxTransformer2DModel(
        patch_size=1, in_channels=12, num_layers=2, num_single_layers=2, attention_head_dim=8, num_attention_heads=4,
        joint_attention_dim=16, pooled_projection_dim=16, guidance_embeds=False, axes_dims_rope=(2, 2, 4),
    )  # fmt: skip

    def draw(number: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        shapes = ((number, 16, 12), (number, 8, 16), (number, 16))
        return (*(torch.randn(shape, generator=generator) for shape in shapes), torch.rand(number, generator=generator))

    def loss(model: Any, images: Tensor, texts: Tensor, pooled: Tensor, times: Tensor) -> Tensor:
        places = torch.zeros(24, 3, device=images.device)
        places[8:, 1], places[8:, 2] = torch.arange(16) // 4, torch.arange(16) % 4
        output = model(
            hidden_states=images, encoder_hidden_states=texts, pooled_projections=pooled, timestep=times,
            img_ids=places[8:], txt_ids=places[:8],
        )  # fmt: skip
        return F.mse_loss(output.sample, images)

    return Custom(built, draw, loss)


class NextToken(Training):
    """A model that gives logits for each token."""

    def samples(self, number: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        return (tokens_of(number, generator, LENGTH + 1),)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        (tokens,) = batch
        logits = self.model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        self.log("train_loss", loss)
        return loss


def x_transformer(**settings: Any) -> nn.Module:
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(dim=32, depth=2, heads=4, attn_dim_head=8, **settings)
    built: nn.Module = TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=LENGTH, attn_layers=layers)
    return built


@of("x-transformers")
def x_transformers() -> NextToken:
    return NextToken(x_transformer())


@of("x-transformers")
def x_transformers_rotary() -> NextToken:
    return NextToken(x_transformer(rotary_pos_emb=True, ff_glu=True, attn_flash=True))


def adapted(model: Any, **settings: Any) -> LanguageModel:
    """The model, frozen, with low-rank adapters that train; none begins with zeros, so that all move at once."""
    from peft import LoraConfig, get_peft_model

    return LanguageModel(get_peft_model(model, LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, **settings)))


@of("transformers", "peft")
def lora_llama() -> LanguageModel:
    from tests.zoo.decoders import llama

    return adapted(llama().model, target_modules=["q_proj", "v_proj"])


@of("transformers", "peft")
def lora_gpt2() -> LanguageModel:
    from tests.zoo.decoders import gpt2

    return adapted(gpt2().model, target_modules=["c_attn"], fan_in_fan_out=True)

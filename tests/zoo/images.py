"""Models of images: transformers, timm and torchvision."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.registry import of
from tests.zoo.steps import CLASSES, Custom, ImageClassifier

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def model(family: str, head: str, **settings: Any) -> nn.Module:
    """The model of a family of transformers with a head."""
    import transformers

    config = getattr(transformers, f"{family}Config")(**settings)
    built: nn.Module = getattr(transformers, family + head)(config)
    for parameter in built.parameters():
        if (
            parameter.dim() > 2 and not parameter.any()
        ):  # tokens of zeros: the norm after them divides by next to nothing
            nn.init.normal_(parameter, std=0.02)
    return built


def drawn_for_width(built: nn.Module) -> nn.Module:
    """Draw the weights for the width: the families' own standard deviation lets the signal of a small model vanish."""
    for part in built.modules():
        if isinstance(part, nn.Linear | nn.Conv2d | nn.ConvTranspose2d):
            part.reset_parameters()
    return built


def classifier(family: str, **settings: Any) -> ImageClassifier:
    return ImageClassifier(model(family, "ForImageClassification", **settings, num_labels=CLASSES))


def images_of(number: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    return (torch.randn(number, 3, 32, 32, generator=generator),)


@of("transformers")
def vit() -> ImageClassifier:
    return classifier("ViT", **SIZES)


@of("transformers")
def deit() -> ImageClassifier:
    return classifier("DeiT", **SIZES)


@of("transformers")
def dinov2() -> ImageClassifier:
    sizes = {name: value for name, value in SIZES.items() if name != "intermediate_size"}
    return classifier("Dinov2", **sizes, mlp_ratio=2)


@of("transformers")
def beit() -> ImageClassifier:
    return classifier("Beit", **SIZES, drop_path_rate=0.0)


@of("transformers")
def swin() -> ImageClassifier:
    return classifier(
        "Swin", image_size=32, patch_size=4, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4,
        drop_path_rate=0.0,
    )  # fmt: skip


@of("transformers")
def swinv2() -> ImageClassifier:
    return classifier(
        "Swinv2", image_size=32, patch_size=4, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4,
        drop_path_rate=0.0,
    )  # fmt: skip


@of("transformers")
def convnext() -> ImageClassifier:
    sizes = {"hidden_sizes": [16, 32], "depths": [2, 2], "num_stages": 2, "patch_size": 2, "image_size": 32}
    return classifier("ConvNext", **sizes, layer_scale_init_value=1.0)


@of("transformers")
def resnet() -> ImageClassifier:
    return classifier("ResNet", embedding_size=16, hidden_sizes=[16, 32], depths=[2, 2], layer_type="basic")


@of("transformers")
def vit_mae() -> Custom:
    """The noise that chooses what is masked is in the data: ranks draw other numbers."""
    decoder = {"decoder_hidden_size": 16, "decoder_intermediate_size": 32}
    heads = {"decoder_num_attention_heads": 4, "decoder_num_hidden_layers": 2}

    def draw(number: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        return (*images_of(number, generator), torch.rand(number, 16, generator=generator))

    def loss(model: Any, images: Tensor, noise: Tensor) -> Tensor:
        return model(pixel_values=images, noise=noise).loss

    return Custom(model("ViTMAE", "ForPreTraining", **SIZES, **decoder, **heads), draw, loss)


@of("transformers")
def segformer() -> Custom:
    sizes = {"hidden_sizes": [8, 16], "depths": [1, 2], "num_attention_heads": [1, 2], "sr_ratios": [2, 1]}
    shapes = {"patch_sizes": [7, 3], "strides": [4, 2], "mlp_ratios": [2, 2], "num_encoder_blocks": 2}
    dropout = {
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "classifier_dropout_prob": 0.0,
        "drop_path_rate": 0.0,
    }
    built = model(
        "Segformer", "ForSemanticSegmentation", **sizes, **shapes, **dropout, decoder_hidden_size=16, num_labels=CLASSES
    )

    def draw(number: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        labels = torch.randint(CLASSES, (number, 32, 32), generator=generator)
        return (*images_of(number, generator), labels)

    def loss(model: Any, images: Tensor, labels: Tensor) -> Tensor:
        return model(pixel_values=images, labels=labels).loss

    return Custom(drawn_for_width(built), draw, loss)


@of("transformers")
def detr() -> Custom:
    """The detector without its matching, which divides by the number of boxes in the batch.

    Its loss is one of some channels: a norm has returned them, and the mean square of all says nothing but rounding.
    """
    import transformers

    backbone = transformers.ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic", out_features=["stage2"]
    )
    built = model(
        "Detr", "Model", backbone_config=backbone, use_timm_backbone=False, backbone=None, d_model=32, num_queries=5,
        encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48,
        decoder_ffn_dim=48, dropout=0.0,
    )  # fmt: skip

    def loss(model: Any, images: Tensor) -> Tensor:
        boxes = model(pixel_values=images).last_hidden_state[..., :4]
        return (boxes - images.mean((1, 2, 3))[:, None, None]).square().mean()

    return Custom(built, images_of, loss)


@of("transformers")
def yolos() -> Custom:
    """Boxes, each to be that of its sample: without the matching, which divides by the number in the batch."""
    built = model("Yolos", "ForObjectDetection", **{**SIZES, "image_size": [32, 32]}, num_detection_tokens=5)

    def draw(number: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        return (*images_of(number, generator), torch.rand(number, 5, 4, generator=generator))

    def loss(model: Any, images: Tensor, boxes: Tensor) -> Tensor:
        output = model(pixel_values=images)
        return F.l1_loss(output.pred_boxes, boxes) + output.logits.square().mean()

    return Custom(built, draw, loss)


@of("transformers")
def sam() -> Custom:
    """A mask for a point in the image."""
    import transformers

    config = transformers.SamConfig(
        vision_config={
            "hidden_size": 32, "output_channels": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
            "image_size": 32, "patch_size": 4, "mlp_dim": 48, "window_size": 4, "global_attn_indexes": [1],
            "num_pos_feats": 8,
        },
        prompt_encoder_config={
            "hidden_size": 16, "image_size": 32, "patch_size": 4, "mask_input_channels": 4, "image_embedding_size": 8
        },
        mask_decoder_config={
            "hidden_size": 16, "mlp_dim": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
            "iou_head_hidden_dim": 16,
        },
    )  # fmt: skip

    def draw(number: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        masks = torch.randint(2, (number, 32, 32), generator=generator).float()
        return (*images_of(number, generator), 32 * torch.rand(number, 1, 1, 2, generator=generator), masks)

    def loss(model: Any, images: Tensor, points: Tensor, masks: Tensor) -> Tensor:
        output = model(pixel_values=images, input_points=points, multimask_output=False)
        logits = 100 * output.pred_masks[:, 0, 0]  # a product of small features, which would train next to nothing
        return F.binary_cross_entropy_with_logits(logits, masks)

    return Custom(drawn_for_width(transformers.SamModel(config)), draw, loss)


def of_timm(name: str, size: int = 32, **settings: Any) -> ImageClassifier:
    import timm

    return ImageClassifier(timm.create_model(name, num_classes=CLASSES, **settings), size)


@of("timm")
def timm_resnet() -> ImageClassifier:
    return of_timm("resnet18", layers=(1, 1, 1, 1), channels=(8, 8, 16, 16), stem_width=8)


@of("timm")
def timm_vit() -> ImageClassifier:
    return of_timm("vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=4)


@of("timm")
def timm_swin() -> ImageClassifier:
    return of_timm(
        "swin_tiny_patch4_window7_224", img_size=32, window_size=4, embed_dim=16, depths=(2, 2), num_heads=(2, 4),
        drop_path_rate=0.0,
    )  # fmt: skip


@of("timm")
def timm_convnext() -> ImageClassifier:
    return of_timm("convnext_tiny", depths=(1, 1, 2, 1), dims=(8, 8, 16, 16), ls_init_value=1.0)


@of("timm")
def timm_mixer() -> ImageClassifier:
    from timm.models.mlp_mixer import MlpMixer

    return ImageClassifier(MlpMixer(num_classes=CLASSES, img_size=32, patch_size=8, num_blocks=2, embed_dim=32))


@of("timm")
def timm_efficientnet() -> ImageClassifier:
    return of_timm("efficientnet_b0", drop_rate=0.0, drop_path_rate=0.0)


@of("timm")
def timm_cait() -> ImageClassifier:
    return of_timm("cait_xxs24_224", img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=4, init_values=1.0)


@of("torchvision")
def torchvision_resnet() -> ImageClassifier:
    from torchvision.models.resnet import BasicBlock, ResNet

    return ImageClassifier(ResNet(BasicBlock, [1, 1, 1, 1], num_classes=CLASSES, width_per_group=64))


@of("torchvision")
def torchvision_vit() -> ImageClassifier:
    from torchvision.models.vision_transformer import VisionTransformer

    return ImageClassifier(
        VisionTransformer(
            image_size=32, patch_size=8, num_layers=2, num_heads=4, hidden_dim=32, mlp_dim=48, num_classes=CLASSES
        )
    )


@of("torchvision")
def torchvision_swin() -> ImageClassifier:
    from torchvision.models.swin_transformer import SwinTransformer

    return ImageClassifier(
        SwinTransformer(
            [4, 4], embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=[4, 4], num_classes=CLASSES,
            stochastic_depth_prob=0.0,
        )
    )  # fmt: skip

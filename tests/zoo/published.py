"""LightningModules as packages publish them, and the training steps of their documentation."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from tests.zoo.registry import of
from tests.zoo.steps import CLASSES, GLOBAL_BATCH, STEPS, VOCABULARY, Published

NUMBER = STEPS * GLOBAL_BATCH


def drawing() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def images(size: int = 32, **others: Any) -> list[dict[str, Tensor]]:
    """Samples with an image, and what functions of a generator draw."""
    generator = drawing()
    return [
        {
            "image": torch.rand(3, size, size, generator=generator),
            **{key: draw(generator) for key, draw in others.items()},
        }
        for _ in range(NUMBER)
    ]


def a_class(generator: torch.Generator) -> Tensor:
    return torch.randint(CLASSES, (), generator=generator)


# torchgeo ------------------------------------------------------------------------------------------------------------


@of("torchgeo")
def torchgeo_classification() -> Published:
    from torchgeo.trainers import ClassificationTask

    task = ClassificationTask(model="resnet18", in_channels=3, task="multiclass", num_classes=CLASSES)
    return Published(task, images(label=a_class))


@of("torchgeo")
def torchgeo_segmentation() -> Published:
    from torchgeo.trainers import SemanticSegmentationTask

    task = SemanticSegmentationTask(
        model="unet", backbone="resnet18", in_channels=3, task="multiclass", num_classes=CLASSES, loss="ce"
    )
    return Published(task, images(mask=lambda g: torch.randint(CLASSES, (32, 32), generator=g)))


@of("torchgeo")
def torchgeo_byol() -> Published:
    from torchgeo.trainers import BYOLTask

    task = BYOLTask(model="resnet18", in_channels=3)
    task.augmentation_train = None
    task.model.augment = nn.Identity()  # it draws
    return Published(task, images(64))


@of("torchgeo")
def torchgeo_simclr() -> Published:
    from torchgeo.trainers import SimCLRTask

    return Published(SimCLRTask(model="resnet18", in_channels=3, augmentations=nn.Identity()), images())


@of("torchgeo")
def torchgeo_moco() -> Published:
    from torchgeo.trainers import MoCoTask

    task = MoCoTask(
        model="resnet18", in_channels=3, version=2, memory_bank_size=64,
        augmentation1=nn.Identity(), augmentation2=nn.Identity(),
    )  # fmt: skip
    return Published(task, images())


# anomalib ------------------------------------------------------------------------------------------------------------


def anomaly_images(module: L.LightningModule, size: int = 64) -> Published:
    """Images without anomalies, in the batches of anomalib, which look at what they hold."""
    from anomalib.data import ImageBatch, ImageItem

    generator = drawing()
    items = [
        ImageItem(
            image=torch.rand(3, size, size, generator=generator),
            gt_label=torch.tensor(0),
            gt_mask=torch.zeros(size, size, dtype=torch.bool),
        )
        for _ in range(NUMBER)
    ]
    return Published(module, items, ImageBatch.collate)


NOTHING: dict[str, Any] = {"post_processor": False, "evaluator": False, "visualizer": False}


@of("anomalib")
def anomalib_reverse_distillation() -> Published:
    from anomalib.models import ReverseDistillation as Model

    processor = Model.configure_pre_processor((64, 64))
    return anomaly_images(Model(backbone="resnet18", pre_trained=False, pre_processor=processor, **NOTHING))


@of("anomalib")
def anomalib_fre() -> Published:
    from anomalib.models import Fre

    module = Fre(
        backbone="resnet18",
        layer="layer3",
        pre_trained=False,
        input_dim=1024,
        latent_dim=16,
        pre_processor=False,
        **NOTHING,
    )
    return anomaly_images(module)


# lightly: the steps of its documentation -----------------------------------------------------------------------------


class Contrast(L.LightningModule):
    """Two views of each image, a network, a projection and a loss.

    Args:
        head: The projection.
        criterion: The loss of both projections.
    """

    def __init__(self, head: nn.Module, criterion: nn.Module) -> None:
        super().__init__()
        import torchvision

        self.backbone = nn.Sequential(*list(torchvision.models.resnet18().children())[:-1])
        self.head, self.criterion = head, criterion

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        first, second = (self.head(self.backbone(view).flatten(1)) for view in batch)
        loss: Tensor = self.criterion(first, second)
        return loss


def views() -> list[tuple[Tensor, Tensor]]:
    generator = drawing()
    return [
        (torch.randn(3, 32, 32, generator=generator), torch.randn(3, 32, 32, generator=generator))
        for _ in range(NUMBER)
    ]


@of("lightly")
def lightly_simclr() -> Published:
    from lightly.loss import NTXentLoss
    from lightly.models.modules import SimCLRProjectionHead

    head = SimCLRProjectionHead(512, 64, 32, batch_norm=False)
    return Published(Contrast(head, NTXentLoss(gather_distributed=True)), views())


@of("lightly")
def lightly_simclr_alone() -> Published:
    """Each rank compares its own samples."""
    from lightly.loss import NTXentLoss
    from lightly.models.modules import SimCLRProjectionHead

    return Published(Contrast(SimCLRProjectionHead(512, 64, 32, batch_norm=False), NTXentLoss()), views())


@of("lightly")
def lightly_barlow_twins() -> Published:
    from lightly.loss import BarlowTwinsLoss
    from lightly.models.modules import BarlowTwinsProjectionHead

    return Published(
        Contrast(BarlowTwinsProjectionHead(512, 64, 64), BarlowTwinsLoss(gather_distributed=True)), views()
    )


@of("lightly")
def lightly_vicreg() -> Published:
    from lightly.loss import VICRegLoss
    from lightly.models.modules.heads import VICRegProjectionHead

    head = VICRegProjectionHead(512, 64, 64, num_layers=2)
    return Published(Contrast(head, VICRegLoss(gather_distributed=True)), views())


# litgpt: the module of its documentation -----------------------------------------------------------------------------


class LitLLM(L.LightningModule):
    """Trains a model of litgpt."""

    def __init__(self, **config: Any) -> None:
        super().__init__()
        from litgpt import GPT, Config

        small = {"n_layer": 2, "n_embd": 32, "n_head": 4, "padded_vocab_size": VOCABULARY, "block_size": 16}
        self.model = GPT(Config.from_name(**small, **config))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        from litgpt.utils import chunked_cross_entropy

        logits = self.model(batch["input_ids"])
        loss: Tensor = chunked_cross_entropy(logits[..., :-1, :], batch["labels"][..., 1:])
        self.log("train_loss", loss)
        return loss


def rows_of_tokens() -> list[dict[str, Tensor]]:
    tokens = torch.randint(VOCABULARY, (NUMBER, 16), generator=drawing())
    return [{"input_ids": row, "labels": row} for row in tokens]


@of("litgpt")
def litgpt_pythia() -> Published:
    return Published(LitLLM(name="pythia-14m"), rows_of_tokens())


@of("litgpt")
def litgpt_gemma() -> Published:
    config = {"intermediate_size": 64, "n_query_groups": 2, "head_size": 8}
    return Published(LitLLM(name="Gemma-2-2b", **config), rows_of_tokens())


@of("litgpt")
def litgpt_mixtral() -> Published:
    config = {"intermediate_size": 64, "n_query_groups": 2, "n_expert": 4, "n_expert_per_token": 2}
    return Published(LitLLM(name="Mixtral-8x7B-v0.1", **config), rows_of_tokens())

# python recipes/script/train.py 2    (the number of ranks)
import sys

import lightning as L
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import lightning_parallel  # noqa: F401 - registers the names


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))

    def training_step(self, batch, batch_idx):
        images, classes = batch
        loss = F.cross_entropy(self.model(images), classes)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    L.seed_everything(0)
    images, classes = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(classes))
    trainer = L.Trainer(max_epochs=2, strategy="fsdp_custom", devices=int(sys.argv[1]))
    trainer.fit(Classifier(), DataLoader(data, batch_size=32, shuffle=True))

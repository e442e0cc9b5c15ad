"""A convolutional classifier with BatchNorm for scikit-learn's digits: trains in seconds and downloads nothing."""

import torch
from pytorch_lightning import LightningDataModule, LightningModule
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics.classification import MulticlassAccuracy

NUM_CLASSES = 10


def convolution(in_channels: int, out_channels: int) -> list[nn.Module]:
    # No bias: BatchNorm subtracts the mean, and with it any bias.
    return [
        nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(),
    ]


class DigitClassifier(LightningModule):
    """Maps images `[batch, 1, 8, 8]` to logits `[batch, classes]`."""

    def __init__(self, width: int = 16, learning_rate: float = 1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.sequential_module = nn.Sequential(
            *convolution(1, width),
            nn.MaxPool2d(2),
            *convolution(width, 2 * width),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(2 * width * 2 * 2, NUM_CLASSES),
        )
        self.example_input_array = torch.zeros(8, 1, 8, 8)
        self.accuracy = MulticlassAccuracy(NUM_CLASSES, average="micro")

    def forward(self, images: Tensor) -> Tensor:
        return self.sequential_module(images)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        logits = self(images)
        self.accuracy(logits, labels)
        self.log("val_loss", F.cross_entropy(logits, labels), sync_dist=True)
        self.log("val_accuracy", self.accuracy, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.hparams.learning_rate)


class Digits(LightningDataModule):
    """1,797 scanned digits, of which a fifth is for validation."""

    def __init__(self, batch_size: int = 64, seed: int = 0):
        super().__init__()
        self.save_hyperparameters()
        images, labels = load_digits(return_X_y=True)
        digits = TensorDataset(
            torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16,  # grey levels 0 to 16
            torch.tensor(labels),
        )
        self.train_set, self.validation_set = random_split(digits, [0.8, 0.2], torch.Generator().manual_seed(seed))

    def train_dataloader(self) -> DataLoader:
        generator = torch.Generator().manual_seed(self.hparams.seed)
        return DataLoader(self.train_set, batch_size=self.hparams.batch_size, shuffle=True, generator=generator)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.validation_set, batch_size=self.hparams.batch_size)

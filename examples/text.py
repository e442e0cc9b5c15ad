"""The text of Python's documentation as a data module: downloads nothing; a token is an ASCII code."""

from pydoc_data.topics import topics

import numpy
import torch
from pytorch_lightning import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

VOCABULARY_SIZE = 128  # all ASCII codes, so that a model can generate text without its training data


def encode(text: str) -> Tensor:
    """Return the tokens of a text, `[characters]`; a character that is not ASCII becomes `?`."""
    codes = numpy.frombuffer(text.encode("ascii", errors="replace"), dtype=numpy.uint8)
    return torch.from_numpy(codes.astype(numpy.int64))


def decode(tokens: Tensor) -> str:
    """Return the text of tokens `[characters]`, the inverse of `encode`."""
    return bytes(tokens.tolist()).decode("ascii")


def python_documentation() -> str:
    """Return the topics of `help()` without repeated paragraphs, which could be in training and validation data."""
    paragraphs = "\n\n".join(topics[name] for name in sorted(topics)).split("\n\n")
    return "\n\n".join(dict.fromkeys(paragraphs))


def unigram_loss(train: Tensor, validation: Tensor) -> float:
    """Return the loss, in nats per character, of predicting `validation` from the character frequencies of `train`.

    Each count is increased by one, so that a character that does not occur in `train` has a finite loss.
    """
    counts = torch.bincount(train, minlength=VOCABULARY_SIZE) + 1
    log_probabilities = (counts / counts.sum()).log()
    return -log_probabilities[validation].mean().item()


class PythonDocs(LightningDataModule):
    """Batches of (tokens, next tokens), each `[batch, block]`; the end of the text is for validation."""

    def __init__(self, block_size: int = 128, batch_size: int = 16, validation_fraction: float = 0.1, seed: int = 0):
        super().__init__()
        self.save_hyperparameters()
        tokens = encode(python_documentation())
        split = round(len(tokens) * (1 - validation_fraction))
        self.train_tokens, self.validation_tokens = tokens[:split], tokens[split:]

    @property
    def unigram_loss(self) -> float:
        """Loss of the unigram model on the validation split, in nats per character."""
        return unigram_loss(self.train_tokens, self.validation_tokens)

    def train_dataloader(self) -> DataLoader:
        return self._loader(self.train_tokens, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return self._loader(self.validation_tokens, shuffle=False)

    def _loader(self, tokens: Tensor, *, shuffle: bool) -> DataLoader:
        blocks = tokens.unfold(0, self.hparams.block_size + 1, self.hparams.block_size)  # blocks overlap by one token
        return DataLoader(
            TensorDataset(blocks[:, :-1], blocks[:, 1:]),
            batch_size=self.hparams.batch_size,
            shuffle=shuffle,
            generator=torch.Generator().manual_seed(self.hparams.seed),
        )

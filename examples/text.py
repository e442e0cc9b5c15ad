"""Text of Python's own documentation as a data module: nothing is downloaded, a token is an ASCII code."""

from pydoc_data.topics import topics

import torch
from pytorch_lightning import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

VOCABULARY_SIZE = 128  # fixed, so that a model alone, without its data, can read and write text


def encode(text: str) -> Tensor:
    """Tokens of a text, `[characters]`; what is not ASCII becomes `?`."""
    return torch.tensor(list(text.encode("ascii", errors="replace")))


def decode(tokens: Tensor) -> str:
    """Text of tokens `[characters]`, the inverse of `encode`."""
    return bytes(tokens.tolist()).decode("ascii")


def python_documentation() -> str:
    """The topics of `help()`, each paragraph once: several topics quote others, which would leak into validation."""
    paragraphs = "\n\n".join(topics[name] for name in sorted(topics)).split("\n\n")
    return "\n\n".join(dict.fromkeys(paragraphs))


def unigram_loss(train: Tensor, validation: Tensor) -> float:
    """Loss in nats per character of the best model that ignores context: character frequencies of `train`.

    Every character is counted once more than it occurs, so that one never seen in `train` keeps a finite loss.
    """
    counts = torch.bincount(train, minlength=VOCABULARY_SIZE) + 1
    log_probabilities = (counts / counts.sum()).log()
    return -log_probabilities[validation].mean().item()


class PythonDocs(LightningDataModule):
    """Batches of (tokens, next tokens), each `[batch, block]`; the end of the text is held out for validation."""

    def __init__(self, block_size: int = 128, batch_size: int = 16, validation_fraction: float = 0.1, seed: int = 0):
        super().__init__()
        self.save_hyperparameters()
        tokens = encode(python_documentation())
        split = round(len(tokens) * (1 - validation_fraction))
        self.train_tokens, self.validation_tokens = tokens[:split], tokens[split:]

    @property
    def unigram_loss(self) -> float:
        """What a model has to beat on the validation split, in nats per character."""
        return unigram_loss(self.train_tokens, self.validation_tokens)

    def train_dataloader(self) -> DataLoader:
        return self._loader(self.train_tokens, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return self._loader(self.validation_tokens, shuffle=False)

    def _loader(self, tokens: Tensor, *, shuffle: bool) -> DataLoader:
        blocks = tokens.unfold(0, self.hparams.block_size + 1, self.hparams.block_size)  # neighbours share one token
        return DataLoader(
            TensorDataset(blocks[:, :-1], blocks[:, 1:]),
            batch_size=self.hparams.batch_size,
            shuffle=shuffle,
            generator=torch.Generator().manual_seed(self.hparams.seed),
        )

"""A callback that prints the results of a run of the character GPT under any strategy."""

from time import perf_counter
from typing import Any

from pytorch_lightning import Callback, LightningModule, Trainer

from examples.gpt import generate


class Report(Callback):
    """Prints the loss of every epoch, the loss of a unigram model, the speed, the checkpoint and a sample of text."""

    def __init__(self, prompt: str = 'The "', num_characters: int = 300):
        self.prompt = prompt
        self.num_characters = num_characters
        self._validation_losses: list[float] = []
        self._num_tokens = 0
        self._seconds = 0.0
        self._resumed_at = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._validation_losses.clear()  # removes the loss of the sanity check
        self._num_tokens, self._seconds, self._resumed_at = 0, 0.0, perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._num_tokens += batch[0].numel() * trainer.world_size

    # The time of validation, which runs within training, does not count as training time.
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._seconds += perf_counter() - self._resumed_at

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._validation_losses.append(trainer.callback_metrics["val_loss"].item())
        self._resumed_at = perf_counter()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._seconds += perf_counter() - self._resumed_at

    # The strategy has been torn down: the model is complete again in the user's process.
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        lines = {}
        if self._validation_losses:
            losses = " ".join(f"{loss:.3f}" for loss in self._validation_losses)
            lines["validation loss"] = f"{losses} nats per character"
            lines["unigram loss"] = f"{trainer.datamodule.unigram_loss:.3f}, by character frequencies alone"
        if self._num_tokens:
            lines["speed"] = f"{self._num_tokens / self._seconds:,.0f} tokens/s in training"
        lines["balance"] = getattr(trainer.strategy, "balance", None)
        lines["checkpoint"] = getattr(trainer.checkpoint_callback, "best_model_path", None)
        print("", *(f"{name:<16} {value}" for name, value in lines.items() if value), sep="\n")
        print("", generate(pl_module, self.prompt, self.num_characters), sep="\n")

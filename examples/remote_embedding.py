"""A model in three processes: its embedding table on a worker, its trunk on two trainers under DDP.

``python -m examples.remote_embedding`` trains the model on the text of Python's documentation, then trains the same
model in one process, and compares every parameter.

    trainer0:  trunk (DDP) ──┐ tokens, gradients
                 ▲           ├──────────────────▶ embedding: table, its optimizer
                 ▼ averages  │
    trainer1:  trunk (DDP) ──┘
"""

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import rpc
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from examples.distributed_basics.launch import launch, remote_procedure_calls
from strategies import RemoteModule

NUM_TRAINERS, CHARACTERS, CONTEXT, WIDTH, HIDDEN, BATCH = 2, 128, 8, 16, 128, 64
NAMES = ("trainer0", "trainer1", "embedding")


@dataclass(frozen=True)
class Settings:
    """Arguments of the command line; optimizers are names of classes in ``torch.optim``."""

    steps: int = 300
    table_optimizer: str = "Adagrad"
    trunk_optimizer: str = "AdamW"
    table_lr: float = 0.05
    trunk_lr: float = 0.003
    double: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.double else torch.float32


class Model(nn.Module):
    """Predicts the next character from the last ``CONTEXT`` characters: maps tokens `[batch, CONTEXT]` to logits."""

    def __init__(self, table: nn.Module, trunk: nn.Module) -> None:
        super().__init__()
        self.table, self.trunk = table, trunk

    def forward(self, tokens: Tensor) -> Tensor:
        return self.trunk(self.table(tokens).flatten(1))


def initial(settings: Settings) -> Model:
    """Return the model in one process, with the same weights at each call."""
    torch.manual_seed(0)
    trunk = nn.Sequential(nn.Linear(CONTEXT * WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CHARACTERS))
    return Model(nn.Embedding(CHARACTERS, WIDTH), trunk).to(settings.dtype)


def batches(text: Tensor, steps: int, rank: int, num_shares: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield contexts and next characters: one trainer's share of each batch. All trainers draw the same batches."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        starts = torch.randint(len(text) - CONTEXT, (BATCH,), generator=generator)[rank::num_shares]
        windows = text[starts[:, None] + torch.arange(CONTEXT + 1)]
        yield windows[:, :-1], windows[:, -1]


def train(model: nn.Module, optimizers: Sequence[Optimizer], data: Iterator[tuple[Tensor, Tensor]]) -> list[float]:
    """Run an ordinary training loop, which does not depend on where the table is; return the loss of each step."""
    losses = []
    for tokens, targets in data:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = cross_entropy(model(tokens), targets)
        loss.backward()  # DDP averages the gradients of the trunk; the worker averages the gradients of the table
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    return losses


def train_share(rank: int, table: RemoteModule, text: Tensor, settings: Settings, checkpoint: str) -> list[float]:
    """Runs on each trainer. Both trainers get the same table by RPC."""
    group = dist.new_group(list(range(NUM_TRAINERS)), use_local_synchronization=True)
    trunk = initial(settings).trunk
    model = Model(table, trunk)
    optimizers = [
        table.optimizer(getattr(torch.optim, settings.table_optimizer), lr=settings.table_lr),
        getattr(torch.optim, settings.trunk_optimizer)(trunk.parameters(), lr=settings.trunk_lr),
    ]
    ddp = DistributedDataParallel(model, process_group=group)
    losses = train(ddp, optimizers, batches(text, settings.steps, rank, NUM_TRAINERS))
    if rank == 0:
        torch.save(model.state_dict(), checkpoint)  # includes the table
    return losses


def program(rank: int, num_processes: int, text: Tensor, settings: Settings, folder: str) -> None:
    """Runs in each process; all processes except the first only serve RPC calls until the first has finished."""
    with remote_procedure_calls(NAMES[rank], rank, num_processes):
        if rank != 0:
            return
        table = RemoteModule("embedding/cpu", nn.Embedding, args=(CHARACTERS, WIDTH), num_callers=NUM_TRAINERS)
        table.to(settings.dtype).load_state_dict(initial(settings).table.state_dict())
        arguments = (table, text, settings, f"{folder}/model.pt")
        other = rpc.rpc_async(NAMES[1], train_share, args=(1, *arguments), timeout=0)
        shares = zip(train_share(0, *arguments), other.wait(), strict=True)
        torch.save([sum(losses) / NUM_TRAINERS for losses in shares], f"{folder}/losses.pt")


def train_in_one_process(text: Tensor, settings: Settings) -> tuple[Model, list[float]]:
    """Train the same model on the same batches in this process."""
    model = initial(settings)
    optimizers = [
        getattr(torch.optim, settings.table_optimizer)(model.table.parameters(), lr=settings.table_lr),
        getattr(torch.optim, settings.trunk_optimizer)(model.trunk.parameters(), lr=settings.trunk_lr),
    ]
    return model, train(model, optimizers, batches(text, settings.steps, 0, 1))


def compare(text: Tensor, settings: Settings) -> tuple[Model, list[float], float]:
    """Train in three processes and in one.

    Returns:
        The model of the three processes, the loss of each of its steps, and the largest difference in a parameter or a
        loss between the three processes and one process.
    """
    with tempfile.TemporaryDirectory(prefix="relay-basics-") as folder:
        launch(program, len(NAMES), text, settings, folder)
        state = torch.load(Path(folder) / "model.pt", weights_only=True)
        losses: list[float] = torch.load(Path(folder) / "losses.pt", weights_only=True)
    expected, expected_losses = train_in_one_process(text, settings)
    differences = [(value - state[name]).abs().max().item() for name, value in expected.state_dict().items()]
    differences += [abs(a - b) for a, b in zip(losses, expected_losses, strict=True)]
    model = initial(settings)
    model.load_state_dict(state)
    return model, losses, max(differences)


def main() -> None:
    # Imported here because it imports Lightning, which the three processes do not need.
    from examples.text import encode, python_documentation, unigram_loss

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = Settings()
    parser.add_argument("--steps", type=int, default=defaults.steps)
    parser.add_argument("--table_optimizer", default=defaults.table_optimizer)
    parser.add_argument("--trunk_optimizer", default=defaults.trunk_optimizer)
    parser.add_argument("--table_lr", type=float, default=defaults.table_lr)
    parser.add_argument("--trunk_lr", type=float, default=defaults.trunk_lr)
    parser.add_argument("--double", action="store_true", help="train in float64, where only rounding differs")
    settings = Settings(**vars(parser.parse_args()))
    tokens = encode(python_documentation())
    split = round(len(tokens) * 0.9)
    text, held_out = tokens[:split], tokens[split:]
    model, losses, difference = compare(text, settings)
    with torch.no_grad():
        windows = held_out.unfold(0, CONTEXT + 1, 1)
        validation = cross_entropy(model(windows[:, :-1]), windows[:, -1]).item()
    print(f"training loss    {losses[0]:.3f} in the first step, {losses[-1]:.3f} in the last step, nats per character")
    print(f"validation loss  {validation:.3f}; character frequencies alone give {unigram_loss(text, held_out):.3f}")
    print(f"one process      parameters and losses differ by at most {difference:.1e}")


if __name__ == "__main__":
    main()

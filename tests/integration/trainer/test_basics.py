"""The programs of ``examples/distributed_basics`` and the remote embedding, by their commands; all check themselves."""

import basics_job
import pytest
import torch
from harness import run
from paths import ROOT

from examples import remote_embedding
from examples.distributed_basics.digits import batches_of_all, digits, share
from examples.distributed_basics.partitioner import partitions
from examples.text import encode, python_documentation

README = (ROOT / "examples/distributed_basics/README.md").read_text()
PROGRAMS = {
    "point_to_point": "point-to-point: every tensor arrived unchanged",
    "collectives": "collectives: all six gave the expected result on each rank",
    "partitioner": "partitioner: averaging by hand gives the gradients and weights of DDP",
    "ddp": "ddp: two processes trained the same model as one process",
    "ddp_split_model": "ddp_split_model: two split models trained like one process with the whole model",
    "checkpoint": "checkpoint: both ranks loaded the checkpoint and continued exactly",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_runs_by_one_command_and_prints_what_its_page_says(name: str) -> None:
    lines = run(basics_job.command, f"examples.distributed_basics.{name}", timeout_seconds=120)
    assert lines[-1] == PROGRAMS[name]
    # Ranks print in any order.
    block = README.split(f"$ python -m examples.distributed_basics.{name}\n")[1].split("```")[0]
    assert sorted(block.splitlines()) == sorted(lines)


def test_every_program_is_on_the_page() -> None:
    files = {path.stem for path in (ROOT / "examples/distributed_basics").glob("*.py")}
    assert files == set(PROGRAMS) | {"__init__", "launch", "digits"}
    assert all(line in README for line in PROGRAMS.values())


def test_partitions_are_disjoint_and_the_same_in_every_process() -> None:
    first, again, other = (partitions(range(11), 3, seed) for seed in (0, 0, 1))
    rows = [[part[i] for i in range(len(part))] for part in first]
    assert [len(part) for part in rows] == [3, 3, 3]
    assert len({row for part in rows for row in part}) == 9
    assert rows == [[part[i] for i in range(len(part))] for part in again]
    assert rows != [[part[i] for i in range(len(part))] for part in other]


def test_shares_make_up_the_batches() -> None:
    batches = batches_of_all(digits(), num_epochs=2)
    shares = [share(batches, rank, 2) for rank in range(2)]
    assert len(batches) == 2 * (1797 // 64)
    for (_, whole), (_, even), (_, odd) in zip(batches, *shares, strict=True):
        assert torch.equal(torch.stack([even, odd], 1).flatten(), whole)


# What launches them


@pytest.mark.slow
def test_the_launcher_ends_all_with_the_first_error_and_stays_on_loopback() -> None:
    text, seconds = run(basics_job.a_failing_program)
    assert "Traceback" in text and "ZeroDivisionError: rank 1 divides" in text
    assert seconds < 60  # nobody waits for a rank that is gone
    assert run(basics_job.addresses) == {"127.0.0.1"}


# The remote embedding

PAIRS = [("SGD", 0.5, "AdamW", 0.003), ("Adagrad", 0.05, "SGD", 0.1), ("AdamW", 0.003, "RMSprop", 0.001)]


@pytest.mark.parametrize(
    ("table", "table_lr", "trunk", "trunk_lr"),
    [pytest.param(*pair, marks=pytest.mark.slow if pair is PAIRS[0] else pytest.mark.nightly) for pair in PAIRS],
)
def test_a_remote_table_and_a_trunk_under_ddp_train_as_one_process(
    table: str, table_lr: float, trunk: str, trunk_lr: float
) -> None:
    settings = remote_embedding.Settings(20, table, trunk, table_lr, trunk_lr, double=True)
    state, losses, difference = run(basics_job.both_ways, encode(python_documentation()), settings)
    assert difference < 1e-9
    assert list(state) == ["table.weight", "trunk.0.weight", "trunk.0.bias", "trunk.2.weight", "trunk.2.bias"]
    # Every part has really been trained, on real text.
    for name, value in remote_embedding.initial(settings).state_dict().items():
        assert not torch.equal(value, state[name]), name
    assert len(losses) == 20 and losses[-1] < losses[0] - 0.5


@pytest.mark.slow
def test_the_remote_embedding_runs_by_one_command() -> None:
    lines = run(basics_job.command, "examples.remote_embedding", "--steps=100", "--double")
    assert [line.split("  ")[0] for line in lines] == ["training loss", "validation loss", "one process"]
    validation, unigram = (float(text.split()[-1]) for text in lines[1].split(";"))
    assert validation < unigram - 0.3
    assert float(lines[2].split()[-1]) < 1e-9

"""``schedule="auto"``: what is found trains as one process does, and is used again where training goes on."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run
from parity import WIDTH, Small, batches, compare, fit
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from test_parity_schedules import UNEVEN, Around
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from strategies import RPCSequentialStrategy, Schedule
from strategies.pipeline.schedule.planned import PlannedSchedule
from strategies.pipeline.schedule.tables import v_half


class Measured(Around):
    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.randn(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def expected(microbatches: int, **arguments: Any) -> Any:
    strategy = RPCSequentialStrategy(schedule="1f1b", microbatches=microbatches, checkpoint="never")
    return fit(Measured, strategy, 1, train=partial(batches, UNEVEN), **arguments)


def auto(**settings: Any) -> RPCSequentialStrategy:
    return RPCSequentialStrategy(**{"schedule": "auto", "microbatches": 4, "checkpoint": "never", **settings})


def check_found() -> None:
    strategy = auto()
    outcome = fit(Measured, strategy, 2, train=partial(batches, UNEVEN), max_epochs=1)
    compare(outcome, expected(4, max_epochs=1))
    found = strategy._division._planned
    outcome.trainer.fit(outcome.model, batches(UNEVEN))
    assert strategy._division._planned is found and strategy.balance == found.balance  # not measured again


def check_resumed(folder: str) -> None:
    """The checkpoint has a schedule that no search finds, which shows that it is used."""
    path = Path(folder) / "last.ckpt"
    first = fit(
        Measured,
        auto(schedule=Schedule("auto", max_microbatches=4), microbatches="auto"),
        2,
        train=partial(batches, UNEVEN),
        max_epochs=1,
    )
    first.trainer.save_checkpoint(path)
    saved = torch.load(path, weights_only=True)
    found = PlannedSchedule.from_state(saved["relay"]["schedule"])
    assert found.balance == first.trainer.strategy.balance and found.microbatches <= 4
    saved["relay"]["schedule"] = PlannedSchedule("v-half", 2, [1, 9, 1, 1], 4, v_half(2, 4)).state()
    torch.save(saved, path)
    resumed = auto(microbatches="auto")
    outcome = fit(Measured, resumed, 2, train=partial(batches, UNEVEN), ckpt_path=str(path))
    assert resumed.balance == [1, 9, 1, 1]
    if found.microbatches == 4:  # dropout draws for each micro-batch
        single = expected(4)
        assert outcome.losses == pytest.approx(single.losses[len(UNEVEN) :], rel=1e-9)
        torch.testing.assert_close(outcome.parameters, single.parameters, rtol=1e-9, atol=1e-9)
    other = auto(microbatches=2)  # not the number in the checkpoint
    fit(Measured, other, 2, train=partial(batches, UNEVEN), ckpt_path=str(path))
    assert other.balance != [1, 9, 1, 1]


@pytest.mark.slow
def test_the_schedule_that_is_found() -> None:
    run(check_found, timeout_seconds=100)


@pytest.mark.slow
def test_resuming(tmp_path: Path) -> None:
    run(check_resumed, str(tmp_path), timeout_seconds=100)


class Blocks(Measured):
    """A model of Hugging Face, measured on an input made from its configuration."""

    def __init__(self) -> None:
        super().__init__()
        del self.sequential_module, self.before, self.after
        self.example_input_array = None
        shape = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 6}
        self.net = LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=2, max_position_embeddings=32))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.net(input_ids=batch, labels=batch).loss
        self.losses.append(loss.item())
        return loss


def tokens() -> Any:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(50, (number, 12), generator=generator) for number in (8, 8, 3)]
    return torch.utils.data.DataLoader(rows, batch_size=None)


def check_others() -> None:
    """Blocks, three stages, and two replicas, which must agree."""
    single = fit(Blocks, RPCSequentialStrategy(schedule="1f1b", microbatches=2), 1, train=tokens)
    compare(fit(Blocks, auto(microbatches=2), 2, train=tokens), single, 1e-5)
    compare(fit(Measured, auto(), 3, train=partial(batches, UNEVEN)), expected(4))


@pytest.mark.slow
def test_blocks_and_three_stages() -> None:
    run(check_others, timeout_seconds=150)


class Manual(Measured):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Short(Small):
    def __init__(self) -> None:
        super().__init__()
        layers = [*self.sequential_module]
        del self.sequential_module
        self.layers = nn.Sequential(*layers[:3])
        self.example_input_array = torch.randn(8, WIDTH)


def refused() -> list[str]:
    """What is refused before a worker starts."""
    found = []
    ways: list[tuple[Any, int, dict[str, Any]]] = [
        (Manual, 2, {"schedule": "auto"}),
        (Short, 2, {"schedule": "zbv"}),
        (Short, 2, {"schedule": Schedule("interleaved", chunks=3)}),
        (Short, 4, {"schedule": "auto"}),
    ]
    for make, devices, options in ways:
        strategy = RPCSequentialStrategy(microbatches=4, **options)
        with pytest.raises(MisconfigurationException) as caught:
            fit(make, strategy, devices, max_epochs=1)
        found.append(str(caught.value))
    return found


def test_what_is_refused() -> None:
    manual, *others = run(refused, timeout_seconds=100)
    assert re.search(r"^schedule='auto' runs training_step once per micro-batch, so manual optimization", manual)
    needed = "4 chunks of layers on 2 devices", "6 chunks of layers on 2 devices", "4 devices"
    for number, text, message in zip((4, 6, 4), needed, others, strict=True):
        expected = f"has no nn.Sequential or nn.ModuleList with at least {number} layers, one for each of the {text}"
        assert expected in message, message

"""Passes without a backward part that follow each other: no stage is called over RPC for them."""

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from harness import run
from torch import Tensor, nn
from undisturbed import until_undisturbed

from strategies.pipeline.driver import Pipeline
from strategies.pipeline.executor.settings import Settings

CPU = torch.device("cpu")
STAGES = 3


class Layer(nn.Module):
    """Counts its calls in a buffer; multiplies by a plain attribute; refuses a value."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.factor = 1.0
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        if (x > 100).any():
            raise ArithmeticError("too large")
        return self.norm(self.linear(x)) * self.factor


def num_calls(pipeline: Pipeline) -> list[int]:
    return [remote._connection.number for remote in pipeline.remotes]


def passes() -> list[float]:
    """The seconds after which each of two errors is raised."""
    seconds: list[float] = []
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    module = nn.Sequential(*[Layer() for _ in range(STAGES)])
    plain = nn.Sequential(*[Layer() for _ in range(STAGES)])
    plain.load_state_dict(module.state_dict())
    settings = Settings(microbatches=2, rpc_timeout_sec=30.0)
    pipeline = Pipeline(module, [1] * STAGES, [CPU] * STAGES, settings)
    pipeline.start()

    def check(x: Tensor, microbatches: int = 2) -> None:
        parts = [plain(part) for part in x.tensor_split(min(microbatches, len(x)))]
        torch.testing.assert_close(module(x), torch.cat(parts))

    def mode(training: bool) -> None:
        for each in (module, plain):
            each.train(training)

    with torch.no_grad():
        mode(False)
        check(torch.randn(5, 4))
        before = num_calls(pipeline)
        for k in range(12):  # of several sizes, also larger than a message with a header
            check(torch.randn([1, 5, 4, 3000][k % 4], 4))
        with torch.inference_mode():
            check(torch.randn(3, 4))  # under other settings
        assert num_calls(pipeline) == before

        for each in (module, plain):  # what changes on the driver in between
            each[0].factor = each[1].factor = each[2].factor = 3.0
        check(torch.randn(5, 4))
        mode(True)  # statistics are updated, micro-batch by micro-batch
        check(torch.randn(8, 4))
        check(torch.randn(8, 4))
        torch.testing.assert_close(dict(module.state_dict()), dict(plain.state_dict()))
        check(torch.randn(8, 4))
        mode(False)
        check(torch.randn(1, 4))

    for each in (module, plain):  # a pass that trains in between
        x = torch.ones(2, 4, requires_grad=True)
        each(x).sum().backward()
        with torch.no_grad():
            for _ in range(3):
                check(torch.randn(2, 4))
    pipeline.wait()

    for k in range(2):  # an error on a worker, then in the stage of the driver; both end what stages wait for
        with torch.no_grad():
            check(torch.randn(2, 4))
            check(torch.randn(2, 4))
            module[1].factor = 1e9 if k else 3.0
            began = time.monotonic()
            try:
                module(torch.full((2, 4), 1e6 if k == 0 else 1.0))
            except ArithmeticError as error:
                assert str(error) == "too large"
            else:
                raise AssertionError("nothing was raised")
            seconds.append(time.monotonic() - began)
            module[1].factor = 3.0
            plain.load_state_dict(module.state_dict())
            check(torch.randn(2, 4))  # by new workers
            check(torch.randn(2, 4))

    with torch.no_grad():
        for _ in range(3):
            check(torch.randn(2, 4))
    kept = vars(module)["forward"]
    pipeline.close()
    torch.testing.assert_close(dict(module.state_dict()), dict(plain.state_dict()))
    try:
        kept(torch.randn(2, 4))
    except RuntimeError as error:
        assert "has ended" in str(error)
    else:
        raise AssertionError("nothing was raised")
    return seconds


def ended_soon(seconds: Sequence[float]) -> None:
    assert max(seconds) < 10, seconds


def test_passes_that_follow_each_other() -> None:
    until_undisturbed(lambda: run(passes), ended_soon)


def killed() -> list[Any]:
    module = nn.Sequential(*[nn.Linear(4, 4) for _ in range(STAGES)])
    pipeline = Pipeline(module, [1] * STAGES, [CPU] * STAGES, Settings(microbatches=1, rpc_timeout_sec=30.0))
    pipeline.start()
    with torch.no_grad():
        for _ in range(3):
            module(torch.ones(2, 4))
        began = time.monotonic()
        pipeline.remotes[0].process.kill()
        try:
            while True:
                module(torch.ones(2, 4))
        except RuntimeError as error:
            raised = str(error)
    with suppress(RuntimeError):
        pipeline.close()
    return [raised, time.monotonic() - began]


def test_a_worker_that_is_killed_between_passes() -> None:
    error, _ = until_undisturbed(lambda: run(killed), lambda found: ended_soon(found[1:]))
    assert "stage 0 (layers 0 to 0: Linear), process " in error and "was killed by signal 9" in error

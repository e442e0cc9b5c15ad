"""An error for lack of memory on a worker or the driver names the stage, what it did, its memory, and what helps."""

from typing import Any

import pytest
import torch
from harness import run
from parity import Small, fit, on_cpus
from pytorch_lightning.utilities.memory import is_oom_error
from torch import Tensor, nn

from strategies import RPCSequentialStrategy
from strategies.pipeline.transport.simulated import SimulatedCommunicator

TEXT = "CUDA out of memory. Tried to allocate 2.00 GiB."


class Hungry(nn.Module):
    """Has no memory for the forward pass of the third micro-batch, or for its backward pass."""

    def __init__(self, in_backward: bool) -> None:
        super().__init__()
        self.in_backward, self.num_calls = in_backward, 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        if self.num_calls == 3 and not self.in_backward:
            self.fail(x)
        if self.num_calls == 3 and x.requires_grad:
            x.register_hook(self.fail)
        return x

    def fail(self, _: Tensor) -> None:
        raise torch.OutOfMemoryError(TEXT)


class HungryAtReceive(Hungry):
    """From the third micro-batch on, its process has no memory for what it receives: first the gradient of the last."""

    def __init__(self) -> None:
        super().__init__(in_backward=False)

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        if self.num_calls == 3:
            SimulatedCommunicator.receive = self.fail
        return x


class HungryOptimizer(torch.optim.SGD):
    """Has no memory for the states of a layer of stage 0."""

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        if any(p.shape == (7, 6) for group in self.param_groups for p in group["params"] if not p.is_meta):
            raise torch.OutOfMemoryError(TEXT)
        return loss


class Model(Small):
    def __init__(self, place: int, in_backward: bool) -> None:
        super().__init__()
        if place < 0:
            self.sequential_module[0], self.sequential_module[1] = nn.Linear(6, 7), nn.Linear(7, 6)
        else:
            self.sequential_module[place] = Hungry(in_backward)

    def configure_optimizers(self) -> Any:
        return HungryOptimizer(self.parameters(), lr=0.1)


def errors(cases: list[tuple[int, bool]], schedule: str) -> list[str]:
    found = []
    for case in cases:
        strategy = RPCSequentialStrategy([2, 4], microbatches=4, schedule=schedule, checkpoint="never")
        with pytest.raises(torch.OutOfMemoryError) as caught:
            fit(lambda case=case: Model(*case), strategy, 2)
        assert is_oom_error(caught.value)
        found.append(str(caught.value))
    return found


@pytest.mark.slow
def test_a_worker_and_the_driver_name_what_they_did() -> None:
    stages = [r"stage 0 (layers 0 to 1: Linear, Hungry)", r"stage 1 (layers 2 to 5: LayerNorm, Linear, Hungry, Linear)"]
    worker, driver, backward, step = run(errors, [(1, False), (4, False), (1, True), (-1, False)], "1f1b")
    for message, stage, doing in (
        (worker, stages[0], "F2"),
        (driver, stages[1], "F2"),
        (backward, stages[0], "B2"),
        (step, "stage 0 (layers 0 to 1: Linear, Linear)", "the optimizer step"),
    ):
        assert message.startswith(f"{TEXT}\n{stage} is out of memory in {doing}: ")
        assert "GiB reserved" in message and "(balance)" in message
    assert "checkpoint='always' recompute all 4 micro-batches instead of 0" in worker
    assert "checkpoint" not in step


def error_of_a_receive() -> str:
    def make() -> Small:
        model = Small()
        model.sequential_module[1] = HungryAtReceive()
        return model

    strategy = RPCSequentialStrategy([2, 4], microbatches=4, schedule="gpipe", data_plane="simulated")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        fit(make, strategy, 2)
    return str(caught.value)


@on_cpus
def test_a_receive_is_named() -> None:
    assert "is out of memory in 0RECV_B3: " in run(error_of_a_receive)

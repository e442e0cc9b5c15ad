"""The CUDA path: stages, communication hooks and balancing on a GPU. Two stages can share one device."""

from typing import Any

import pipeline_job
import pytest
import torch
from harness import run
from torch import nn

from strategies import DDPStrategy, RPCSequentialStrategy
from strategies.common.random_seeds import Seeds
from strategies.pipeline.driver import Pipeline
from strategies.pipeline.executor.settings import Settings

pytestmark = pytest.mark.gpu


def layers(dropout: float) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 16),
        nn.ReLU(inplace=True),
        nn.Dropout(dropout),
        nn.Linear(16, 16),
        nn.Dropout(dropout),
        nn.Linear(16, 3),
    ).double()


def trained(balance: list[int], device: str, dropout: float = 0.0, checkpoint: str = "except_last") -> dict[str, Any]:
    """Three steps of SGD over batches of 8, 7 and 3 rows."""
    module = layers(dropout)
    devices = [torch.device(device)] * len(balance)
    if len(balance) == 1:
        module = module.to(device)
    else:
        cut = sum(balance[:-1])
        for layer in module[cut:]:
            layer.to(device)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    pipeline = Pipeline(
        module,
        balance,
        devices,
        Settings(microbatches=4, checkpoint=checkpoint),
        optimizers=[optimizer],
        seeds=Seeds(5),
    )
    pipeline.start()
    losses = []
    for rows in (8, 7, 3):
        x = torch.randn(rows, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(rows)).to(device)
        optimizer.zero_grad()
        pipeline.optimizers.zero_grad_remotes(optimizer, True)
        loss = module(x).square().mean()
        loss.backward()
        optimizer.step()
        pipeline.optimizers.step_remotes(optimizer, {})
        losses.append(loss.item())
    pipeline.close()
    return {"losses": losses, **{name: p.detach().cpu() for name, p in module.named_parameters()}}


def test_stages_on_a_gpu_train_as_one_process_on_the_cpu() -> None:
    expected = run(trained, [6], "cpu")
    for balance in ([6], [1, 5], [2, 1, 3]):
        actual = run(trained, balance, "cuda:0")
        assert actual["losses"] == pytest.approx(expected["losses"], rel=1e-9)
        for name in expected.keys() - {"losses"}:
            torch.testing.assert_close(actual[name], expected[name], rtol=1e-9, atol=1e-9)


def test_dropout_masks_do_not_depend_on_stages_or_recomputing() -> None:
    expected = run(trained, [6], "cuda:0", 0.5, "never")
    for balance, checkpoint in ([[3, 3], "never"], [[3, 3], "always"], [[2, 2, 2], "except_last"]):
        actual = run(trained, balance, "cuda:0", 0.5, checkpoint)
        assert actual["losses"] == pytest.approx(expected["losses"], rel=1e-9)


def trained_by_lightning(strategy: str, precision: str, device: str = "cuda:0") -> dict[str, Any]:
    strategies = {
        "pipeline": lambda: RPCSequentialStrategy(microbatches=4, parallel_devices=[torch.device(device)] * 2),
        "one stage": lambda: RPCSequentialStrategy(microbatches=4),
        "ddp": lambda: DDPStrategy(comm_hook="bf16_compress"),
    }
    devices = "auto" if strategy == "pipeline" else 1  # Lightning would look for a second GPU
    accelerator = "cpu" if device == "cpu" else "gpu"
    model, trainer = pipeline_job.fit(
        strategies[strategy](),
        devices,
        precision=precision,
        accelerator=accelerator,
        use_distributed_sampler=False,  # that of DDP has another order, with one rank too
    )
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    assert all(p.device.type == "cpu" for p in model.parameters())
    return pipeline_job.outcome(model, trainer)


@pytest.mark.parametrize(("precision", "tolerance"), [("64-true", 1e-9), ("bf16-mixed", 1e-2)])
def test_pipeline_under_lightning(precision: str, tolerance: float) -> None:
    expected = run(trained_by_lightning, "one stage", precision)
    actual = run(trained_by_lightning, "pipeline", precision)
    assert actual["losses"] == pytest.approx(expected["losses"], rel=tolerance)


def test_ddp_with_a_communication_hook_on_nccl() -> None:
    outcome = run(trained_by_lightning, "ddp", "32-true", allow=("env", "port", "thread", "process_group"))
    expected = run(trained_by_lightning, "one stage", "32-true")
    # A group of one rank averages with itself; what is left is the rounding of each gradient to bfloat16.
    assert outcome["losses"] == pytest.approx(expected["losses"], rel=2e-2)
    assert outcome["losses"] != expected["losses"]

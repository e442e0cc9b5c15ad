"""``trainer.verify`` puts the parts of layers together that several pipelines divide, and compares them."""

from typing import Any

import pytest
from harness import run
from verified_nets import Divided, FaultOfAPart, VerifiedData

from strategies import RPCSequentialStrategy
from trainer import verify
from trainer.verification.certificate import DOCUMENTED, EQUAL, WRONG
from trainer.verification.certificate_report import as_dict

pytestmark = pytest.mark.timeout(400)


def verified(kind: type, extra: str, schedule: str, replicas: int) -> Any:
    """Verifies pipelines of two stages, two for each replica."""
    options: dict[str, Any] = {"microbatches": 3, "schedule": schedule, "data_parallel_size": replicas}
    strategy = RPCSequentialStrategy([4, 3], tensor_parallel_size=2, **options)
    return as_dict(
        verify(kind(extra), VerifiedData(), strategy=strategy, accelerator="cpu", devices=4 * replicas, steps=2)
    )


@pytest.mark.slow
def test_a_sound_model_is_equal() -> None:
    found = run(verified, Divided, "none", "1f1b", 1, timeout_seconds=380)
    assert (found["verdict"], found["precision"]) == (EQUAL, "float64")
    assert "tensor_parallel_size=2" in found["strategy"]
    assert found["compared"]["gradients"] == {**found["compared"]["gradients"], "values": 16}


@pytest.mark.slow
def test_a_fault_in_the_part_of_another_pipeline_is_found() -> None:
    found = run(verified, FaultOfAPart, "none", "1f1b", 1, timeout_seconds=380)
    assert found["verdict"] == WRONG
    assert "sequential_module.6.weight" in str(found["origin"])


@pytest.mark.nightly
@pytest.mark.parametrize("extra, replicas", [("none", 2), ("dropout", 1)])
def test_replicas_and_dropout(extra: str, replicas: int) -> None:
    found = run(verified, Divided, extra, "gpipe", replicas, timeout_seconds=380)
    assert found["verdict"] == (EQUAL if extra == "none" else DOCUMENTED)

"""``rebalance="auto"``: arguments that are wrong, and a pipeline of one stage."""

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from two_linear import TwoLinear

from strategies import Rebalance, RPCSequentialStrategy, Schedule
from trainer import Trainer


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"rebalance": "auot"}, r"rebalance must be 'auto', Rebalance\(...\) or None, got 'auot'.*auto"),
        ({"rebalance": Rebalance(2)}, "must be a whole number of at least 3, of which so many"),
        ({"rebalance": Rebalance(True)}, "must be a whole number of at least 3"),
        ({"rebalance": Rebalance(threshold=0)}, "threshold of rebalance must be between 0 and 1, got 0"),
        ({"rebalance": Rebalance(threshold=cast(Any, "1"))}, "threshold of rebalance must be between 0 and 1, got '1'"),
        (
            {"rebalance": "auto", "schedule": Schedule(pipelined_backward=False)},
            "pipelined_backward=False runs the backward passes of all",
        ),
        ({"rebalance": "auto", "schedule": "auto"}, "schedule='auto' has chosen together with the balance"),
        (
            {"rebalance": "auto", "data_parallel_size": 2},
            "is for one pipeline, but data_parallel_size or tensor_parallel_size is larger",
        ),
        (
            {"rebalance": "auto", "gather_on_end": False},
            "brings all weights to the driver for a moment, which gather_on",
        ),
    ],
)
def test_arguments(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(MisconfigurationException, match=match):
        RPCSequentialStrategy(**arguments)


class Net(TwoLinear):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def test_one_stage_has_nothing_to_move(tmp_path: Path) -> None:
    strategy = RPCSequentialStrategy(microbatches=2, rebalance=Rebalance(every_n_steps=3))
    trainer = Trainer(
        accelerator="cpu", devices=1, strategy=strategy, default_root_dir=tmp_path, logger=False, max_steps=4
    )
    trainer.fit(Net())
    assert strategy.balance == [2]

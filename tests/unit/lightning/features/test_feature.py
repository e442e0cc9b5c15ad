"""Features exist if options ask for them; an option on which no feature acts is an error."""

from typing import Any

import pytest
from pytorch_lightning.utilities.exceptions import MisconfigurationException

from strategies import RPCSequentialStrategy, rpc_sequential
from strategies.lightning.features.feature import Feature, overriding
from strategies.lightning.features.recovery import LostWorkers
from strategies.lightning.run import Run


def names(strategy: RPCSequentialStrategy) -> set[str]:
    return {type(feature).__name__ for feature in strategy.features}


def test_features_for_which_options_ask() -> None:
    plain = names(RPCSequentialStrategy())
    asked = names(RPCSequentialStrategy(schedule="1f1b", max_restarts=1, data_parallel_size=2))
    assert asked - plain == {"StepsPerMicrobatch", "LostWorkers", "AveragedReplicas"} and plain < asked
    assert "Rebalancing" in names(RPCSequentialStrategy(rebalance="auto"))


def test_an_option_without_its_feature(monkeypatch: pytest.MonkeyPatch) -> None:
    left = [kind for kind in rpc_sequential.FEATURES if kind is not LostWorkers]
    monkeypatch.setattr(rpc_sequential, "FEATURES", left)
    RPCSequentialStrategy()
    with pytest.raises(MisconfigurationException, match="max_restarts=1 has no effect: no feature of the strategy"):
        RPCSequentialStrategy(max_restarts=1)


def test_only_features_that_follow_batches_are_called_for_each() -> None:
    class Follows(Feature):
        def on_train_batch_start(self, run: Run) -> None:
            """Do nothing."""

    follows: Any = Follows()
    assert overriding([Feature(), follows], "on_train_batch_start") == [follows.on_train_batch_start]
    assert overriding([Feature(), follows], "on_batches_end") == []

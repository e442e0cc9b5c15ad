"""Features exist if options ask for them; an option on which no feature acts is an error."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from two_linear import TwoLinear

from strategies import Recovery, RPCSequentialStrategy, rpc_sequential
from strategies.lightning.features.feature import Feature, overriding
from strategies.lightning.features.recovery import LostWorkers
from strategies.lightning.hooks import Undo
from strategies.lightning.run import Preparation, Run
from trainer import Trainer


def names(strategy: RPCSequentialStrategy) -> set[str]:
    return {type(feature).__name__ for feature in strategy.features}


def test_features_for_which_options_ask() -> None:
    plain = names(RPCSequentialStrategy())
    asked = names(RPCSequentialStrategy(schedule="1f1b", recovery=Recovery(1), data_parallel_size=2))
    assert asked - plain == {"StepsPerMicrobatch", "LostWorkers", "AveragedReplicas"} and plain < asked
    assert "Rebalancing" in names(RPCSequentialStrategy(rebalance="auto"))


def test_an_option_without_its_feature(monkeypatch: pytest.MonkeyPatch) -> None:
    left = [kind for kind in rpc_sequential.FEATURES if kind is not LostWorkers]
    monkeypatch.setattr(rpc_sequential, "FEATURES", left)
    RPCSequentialStrategy()
    with pytest.raises(
        MisconfigurationException,
        match=r"recovery=Recovery\(max_restarts=1, .*\) has no effect: no feature of the strategy",
    ):
        RPCSequentialStrategy(recovery=Recovery(1))


def test_only_features_that_follow_batches_are_called_for_each() -> None:
    class Follows(Feature):
        def on_train_batch_start(self, run: Run) -> None:
            """Do nothing."""

    follows: Any = Follows()
    assert overriding([Feature(), follows], "on_train_batch_start") == [follows.on_train_batch_start]
    assert overriding([Feature(), follows], "on_batches_end") == []


class Notes(Feature):
    """Notes in which order its hooks are called."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def check(self, prepared: Preparation) -> None:
        self.calls.append("check")

    def begin(self, run: Run) -> Iterable[Undo]:
        self.calls.append(f"begin {run.pipeline.balance}")
        yield lambda: self.calls.append("end")

    def on_train_batch_start(self, run: Run) -> None:
        self.calls.append("batch")


def fit(strategy: RPCSequentialStrategy, folder: Path) -> None:
    settings: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    Trainer(accelerator="cpu", devices=1, strategy=strategy, max_steps=2, default_root_dir=folder, **settings).fit(
        TwoLinear()
    )


def test_a_feature_of_a_plug_in(tmp_path: Path) -> None:
    strategy, notes = RPCSequentialStrategy(microbatches=2), Notes()
    strategy.features.append(notes)
    fit(strategy, tmp_path)
    assert notes.calls == ["check", "begin [2]", "batch", "batch", "end"]
    with pytest.raises(RuntimeError, match="the pipeline is not running"):
        _ = strategy.run


def test_the_feature_of_the_guide_is_refused_where_it_makes_no_sense(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(class Heartbeat.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {**globals()}
    exec(code, names)
    with pytest.raises(MisconfigurationException, match="Heartbeat is for several stages"):
        fit(names["strategy"], tmp_path)

"""The two packages of Lightning: which one is used, and what objects of the other one come to."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
from paths import python
from pytorch_lightning.demos.boring_classes import BoringModel
from pytorch_lightning.utilities.exceptions import MisconfigurationException

from strategies import RPCSequentialStrategy
from strategies.lightning.compat import PACKAGE, explain_other_package
from trainer import Trainer
from trainer.cli.model_class import class_paths_of_model

other: Any = import_module("lightning.pytorch")  # after pytorch_lightning, which this process then uses

QUIET = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}


class Theirs(other.LightningModule):
    """A model of the package that this process does not use."""


class Both(other.Callback, pl.Callback):
    pass


# Objects of the other package


GIVEN: dict[str, Callable[[], Any]] = {
    "callbacks": lambda: Trainer(callbacks=[pl.Callback(), other.callbacks.ModelCheckpoint()], **QUIET),
    "logger": lambda: Trainer(**{**QUIET, "logger": other.loggers.CSVLogger("unused")}),
    "strategy": lambda: Trainer(strategy=other.strategies.DDPStrategy(), **QUIET),
    "plugins": lambda: Trainer(plugins=other.plugins.DoublePrecision(), **QUIET),
    "profiler": lambda: Trainer(profiler=other.profilers.SimpleProfiler(), **QUIET),
    "model": lambda: Trainer(**QUIET).fit(Theirs()),
    "datamodule": lambda: Trainer(**QUIET).test(pl.LightningModule(), datamodule=other.LightningDataModule()),
    # under a Trainer of Lightning, which does not look at its callbacks
    "a strategy's trainer": lambda: pl.Trainer(
        strategy=RPCSequentialStrategy(), devices=1, callbacks=[other.Callback()], **QUIET
    ).fit(BoringModel()),
}


@pytest.mark.parametrize("what", GIVEN)
def test_an_object_of_the_other_package_is_refused(what: str) -> None:
    with pytest.raises(MisconfigurationException) as refused:
        GIVEN[what]()
    assert " is a class of lightning.pytorch, but trainer and strategies use pytorch_lightning" in str(refused.value)
    assert "import it before trainer and strategies" in str(refused.value)
    if what == "model":
        assert str(refused.value).startswith(f"{__name__}.Theirs is")


def test_the_other_packages_trainer_shows_why_it_refuses_a_strategy() -> None:
    with pytest.raises(ValueError, match=r"<strategies\.\w+\.RPCSequentialStrategy of pytorch_lightning, which was im"):
        other.Trainer(strategy=RPCSequentialStrategy(), **QUIET)


@pytest.mark.parametrize("cls", [Both, pl.Callback, Trainer, dict, type(None)])
def test_other_classes_are_none_of_the_other_package(cls: type) -> None:
    assert PACKAGE == "pytorch_lightning"
    assert explain_other_package(cls) is None


# The decision, each in an interpreter of its own


EVERY_MODULE = """
import importlib.util, pkgutil, sys, strategies, trainer
left_out = [] if importlib.util.find_spec("ray") else ["strategies.ray"]  # an extra
for package in (strategies, trainer):
    for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not found.name.endswith("__main__") and found.name not in left_out:
            importlib.import_module(found.name)
other = [name for name in sys.modules if name.startswith(("pytorch_lightning", "lightning_fabric"))]
assert not other, other
assert issubclass(trainer.Trainer, L.Trainer)
for name in ("RPCSequentialStrategy", "DDPStrategy", "ZeROStrategy", "DataParallelStrategy"):
    assert issubclass(getattr(strategies, name), L.pytorch.strategies.Strategy), name
"""
HIDE = """
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("pytorch_lightning", "lightning_fabric"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Hidden())
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name: None if name == "pytorch_lightning" else find(name)
"""
SHOW = "from strategies.lightning.compat import PACKAGE; print(PACKAGE)"


@pytest.mark.slow
def test_no_module_uses_pytorch_lightning_if_lightning_comes_first() -> None:
    python("import strategies.pipeline, trainer; import lightning as L" + EVERY_MODULE)  # both are lazy


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "package"),
    [
        (SHOW, "pytorch_lightning"),
        (f"import pytorch_lightning, lightning; {SHOW}", "pytorch_lightning"),
        (HIDE + SHOW, "lightning.pytorch"),  # the only one that is installed
    ],
)
def test_the_package_that_is_imported_first_is_used(code: str, package: str) -> None:
    assert python(code) == package


# The command line


@pytest.mark.parametrize(
    ("arguments", "paths"),
    [
        ("fit --model=mine.Net", ["mine.Net"]),
        ("fit --model mine.Net --data other.Data", ["mine.Net"]),
        ("fit --model.class_path=mine.Net --model.init_args.width=3", ["mine.Net"]),
        ("--config FOLDER/whole.yaml validate", ["mine.Net"]),
        ("fit --config=FOLDER/plain.yaml --model=mine.Other", ["mine.Net", "mine.Other"]),
        ("fit -c FOLDER/nested.yaml", ["mine.Net"]),
        ("fit --model=FOLDER/model.yaml", ["mine.Net"]),
        ("fit --config=FOLDER/data.yaml --trainer.max_epochs=1", []),
        ("--help", []),
    ],
)
def test_class_paths_of_the_model_are_found(tmp_path: Path, arguments: str, paths: list[str]) -> None:
    (tmp_path / "whole.yaml").write_text("validate: {model: {class_path: mine.Net}}\nfit: null\n")
    (tmp_path / "plain.yaml").write_text("model: mine.Net\ntrainer: {callbacks: [{class_path: mine.Callback}]}\n")
    (tmp_path / "nested.yaml").write_text("model: model.yaml\n")
    (tmp_path / "model.yaml").write_text("class_path: mine.Net\ninit_args: {width: '${data.width}'}\n")
    (tmp_path / "data.yaml").write_text("data: mine.Data\n")
    given = arguments.replace("FOLDER", str(tmp_path)).split()
    assert list(class_paths_of_model(given)) == paths

"""Whatever is wrong in a strategy's arguments ends in one clear error, before a process starts, and is not ignored.

The arguments are those of the signatures, so that a new one is covered.
"""

import contextlib
import difflib
import functools
import inspect
import io
import os
import sys
from datetime import timedelta
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paths import ROOT
from pytorch_lightning.utilities.exceptions import MisconfigurationException

from strategies import DDPStrategy, RPCSequentialStrategy, ZeROStrategy
from strategies.commands.failure import Failure
from strategies.lightning.arguments import as_misconfiguration, hints_of
from trainer import Trainer
from trainer.cli import main

STRATEGIES = (DDPStrategy, RPCSequentialStrategy, ZeROStrategy)
OBJECT = object()

WRONG: dict[Any, list[Any]] = {
    bool: ["yes", 2, 0.5, [], OBJECT],
    int: [-1, 0, 2.5, "two", [1], True, float("nan"), OBJECT],
    float: [-1.0, 0.0, "long", float("nan"), float("inf"), [], OBJECT],
    str: ["", "no such thing", 3, b"x", ["gloo"], OBJECT],
    timedelta: [timedelta(), timedelta(seconds=-1), 3, "1h", OBJECT],
    list: ["1, 2", [0, 3], [1.5, 1.5], ["a", "b"], [], {"a": 1}, 3, OBJECT],
    object: [3, "no such thing", ["x"], OBJECT],
}
"""Values that are wrong for an argument of this type (for any number: also those out of range)."""


def wrong_values(hint: Any) -> list[Any]:
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    optional, kinds = NoneType in kinds, tuple(kind for kind in kinds if kind is not NoneType)
    values: list[Any] = [] if optional else [None]
    for kind in kinds:
        if get_origin(kind) is Literal:
            return [*values, "no such thing", 3, OBJECT]
        if get_origin(kind) is list or kind in WRONG:
            return [*values, *WRONG[get_origin(kind) or kind]]
    return [*values, *WRONG[object]]


def arguments() -> list[tuple[type, str, Any]]:
    found = []
    for strategy in STRATEGIES:
        hints = hints_of(strategy.__init__)
        for name, parameter in inspect.signature(strategy.__init__).parameters.items():
            assert name in ("self", "kwargs") or name in hints, f"{strategy.__name__}: {name} has no type"
            assert parameter.kind is not inspect.Parameter.VAR_POSITIONAL
        own = {name: hint for name, hint in hints.items() if name not in ("return", "kwargs")}
        found += [
            (strategy, name, hint) for name, hint in own.items() if hint is not Any and object not in get_args(hint)
        ]
    return found


@st.composite
def mistakes(draw: st.DrawFn) -> tuple[type, str, Any]:
    strategy, name, hint = draw(st.sampled_from(arguments()))
    return strategy, name, draw(st.sampled_from(wrong_values(hint)))


def told(strategy: type, given: dict[str, Any]) -> BaseException:
    """The error of building the Trainer, which starts nothing."""
    with pytest.raises((MisconfigurationException, ValueError, TypeError)) as raised:
        plugin = strategy(**given)
        Trainer(accelerator="cpu", devices=2, strategy=plugin, logger=False, enable_checkpointing=False)
        raise AssertionError(f"{strategy.__name__}({given}) is taken")
    return raised.value


@settings(max_examples=400, deadline=None)
@given(mistakes())
def test_a_wrong_value_of_any_argument(mistake: tuple[type, str, Any]) -> None:
    strategy, name, value = mistake
    if name in ("accelerator", "parallel_devices") and value is not OBJECT and not isinstance(value, int):
        return  # Lightning's own, which the Trainer gives
    if name in ("balance", "module") and isinstance(value, list | str):
        return  # depends on the model: see test_rpc_sequential.py
    error = told(strategy, {name: value})
    assert name in str(error) and len(str(error)) < 600, (strategy, name, value, error)
    file = raised_in(error)
    assert "/torch/" not in file, (strategy, name, value, file)


def raised_in(error: BaseException) -> str:
    trace = error.__traceback__
    assert trace is not None
    while trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_frame.f_code.co_filename


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(arguments()), st.data())
def test_a_misspelt_argument(argument: tuple[type, str, Any], data: st.DataObject) -> None:
    strategy, name, _ = argument
    place = data.draw(st.integers(0, len(name) - 1))
    misspelt = name[:place] + name[place + 1 :]
    known = {known for _, known, _ in arguments()}
    if misspelt in known or not misspelt:
        return
    with pytest.raises(TypeError) as raised:
        strategy(**{misspelt: None})
    assert misspelt in str(raised.value)
    assert difflib.get_close_matches(misspelt, known)


CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


def keys_of(tree: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    if not isinstance(tree, dict):
        return []
    return [key for name, below in tree.items() for key in ((*path, name), *keys_of(below, (*path, name)))]


def said_to(tree: dict[str, Any], file: Path) -> str:
    """The one line that the command line answers to a configuration."""
    file.write_text(yaml.safe_dump(tree, sort_keys=False))
    said = io.StringIO()
    variables, path = dict(os.environ), list(sys.path)
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said), pytest.raises(SystemExit) as end:
            main(["fit", f"--config={file}", "--trainer.logger=false", "--trainer.fast_dev_run=true"])
    finally:
        sys.path[:] = path
        for name in set(os.environ) - set(variables):  # the seed of a configuration
            del os.environ[name]
    assert end.value.code == 2, (tree, said.getvalue())
    assert "Traceback" not in said.getvalue()
    (line,) = [line for line in said.getvalue().splitlines() if line.startswith("error: ")]
    return line


@pytest.mark.slow
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(st.sampled_from(CONFIGS), st.data())
def test_a_mistake_in_an_example_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: Path, data: st.DataObject
) -> None:
    """A key that is misspelt, or whose value is of no possible type."""
    monkeypatch.setattr(sys, "argv", ["trainer"])
    tree = yaml.safe_load(config.read_text())
    checked = [
        keys for keys in keys_of(tree) if "config" not in keys
    ]  # the sizes of a model of Hugging Face are its own
    *path, key = data.draw(st.sampled_from(checked), label="key")
    below = functools.reduce(lambda node, name: node[name], path, tree)
    if data.draw(st.booleans(), label="misspelt"):
        items = list(below.items())
        place = data.draw(st.integers(0, len(key) - 1), label="place")
        misspelt = key[:place] + "_" + key[place:]
        below.clear()
        below.update({misspelt if name == key else name: value for name, value in items})
        assert misspelt in said_to(tree, tmp_path / "config.yaml") or key in said_to(tree, tmp_path / "config.yaml")
    else:
        below[key] = {"no": ["such", "thing"]}
        line = said_to(tree, tmp_path / "config.yaml")
        assert key in line or "no" in line, line


def test_an_error_of_a_layer_in_another_process_is_no_misconfiguration() -> None:
    error = Failure.of(ValueError("of a layer"), "stage 0", "unpacking its layers").exception()
    with pytest.raises(ValueError, match="of a layer"), as_misconfiguration():
        raise error
    with pytest.raises(MisconfigurationException, match="of a setting"), as_misconfiguration():
        raise ValueError("of a setting")

"""Commands are methods of one Protocol, which the driver names and the stage implements."""

import inspect

import pytest

from strategies.commands.declaration import declarations_of
from strategies.pipeline.control.commands import StageCommands
from strategies.pipeline.worker.hosted import HostedStage


def test_the_stage_implements_every_command_and_no_other() -> None:
    commands = declarations_of(StageCommands)
    public = {name for name in vars(StageCommands) if not name.startswith("_")}
    assert set(commands) == public and not HostedStage.__abstractmethods__
    for name in commands:
        assert inspect.signature(getattr(HostedStage, name)) == inspect.signature(getattr(StageCommands, name)), name
    others = {name for name, _ in inspect.getmembers(HostedStage, inspect.isfunction) if not name.startswith("_")}
    assert others - set(commands) == {"describe", "announce_failure", "abort_waits", "next_order"}


def test_a_class_that_lacks_a_command_has_no_objects() -> None:
    with pytest.raises(TypeError, match="abstract method"):
        type("Incomplete", (StageCommands,), {"num_kept": lambda self: 0})()


def test_what_a_command_declares() -> None:
    declared = declarations_of(StageCommands)
    assert declared["step"].changes_values and not declared["step"].doing
    assert declared["place"].changes_values and not declared["capture"].changes_values
    assert declared["value"].doing == "handing over a value"

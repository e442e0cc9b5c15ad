"""The owner of a remote module implements every command that its callers can send."""

import inspect

from strategies.commands.declaration import declarations_of
from strategies.remote.commands import ModuleCommands
from strategies.remote.host import HostedModule


def test_the_hosted_module_implements_every_command() -> None:
    commands = declarations_of(ModuleCommands)
    assert set(commands) == {name for name in vars(ModuleCommands) if not name.startswith("_")}
    assert not HostedModule.__abstractmethods__
    for name in commands:
        assert inspect.signature(getattr(HostedModule, name)) == inspect.signature(getattr(ModuleCommands, name)), name
    assert {name for name, declared in commands.items() if declared.collective} == {
        "zero_grad",
        "make_optimizer",
        "step",
    }

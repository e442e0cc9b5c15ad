"""An answer of a stage that is a stand-in of a test and runs commands at once."""

from typing import Any


class Answered:
    """Stands for :class:`~strategies.pipeline.control.client.Answer`.

    Args:
        result: The result of the command.
    """

    def __init__(self, result: Any) -> None:
        self._result = result

    def wait(self) -> Any:
        return self._result

    rescue = wait

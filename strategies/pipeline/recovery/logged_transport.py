"""The driver's channels to workers that may be replaced. A channel stays when its connection changes.

stage of the driver ──▶ LoggedSender ──▶ sender of the present session ──▶ worker
                            │
                           Log
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from strategies.pipeline.recovery.log import Log, NotRepeated, copied
from strategies.pipeline.stage.edges import tensors_of
from strategies.pipeline.transport.interface import AroundTransport, InChannel, OutChannel, Transport
from strategies.pipeline.transport.journal import Fingerprint, fingerprint


class LoggedTransport(AroundTransport):
    """Connects to the workers of the present session; see :class:`~strategies.pipeline.transport.interface.Transport`.

    Args:
        log: The driver's log.
        transport: The transport of the first session.
        stages: The stages on workers in words.
    """

    def __init__(self, log: Log, transport: Transport, stages: Sequence[str]) -> None:
        super().__init__(transport)
        self._log, self._stages = log, stages
        self._ends: list[LoggedSender | LoggedReceiver] = []

    def connect(self, transport: Transport) -> None:
        """Use the connections of a new session from now on."""
        self._transport = transport
        for end in self._ends:
            end.open(transport)

    def sender(self, peer: int, channel: int) -> "LoggedSender":
        sender = LoggedSender(self._log, peer, channel)
        sender.open(self._transport)
        self._ends.append(sender)
        return sender

    def receiver(self, peer: int, channel: int) -> "LoggedReceiver":
        receiver = LoggedReceiver(self._log, peer, channel, self._stages[peer])
        receiver.open(self._transport)
        self._ends.append(receiver)
        return receiver

    def close(self) -> None:
        """Do nothing: the transport of a session is closed with the session."""


class LoggedSender:
    """Sends values to one worker, and keeps copies of them in the log.

    Args:
        log: The driver's log.
        peer: The rank of the worker.
        channel: The channel to it.
    """

    def __init__(self, log: Log, peer: int, channel: int) -> None:
        self._log, self._peer, self._channel = log, peer, channel
        self.inner: OutChannel

    def open(self, transport: Transport) -> None:
        """Use the connections of a session."""
        self.inner = transport.sender(self._peer, self._channel)

    def send(self, value: Any, pass_number: int, microbatch: int, *, keep: int | None = None) -> bool:
        copy, size_bytes = copied(value)
        sent = _LoggedValue(self, copy, pass_number, microbatch, keep, size_bytes)
        self._log.perform(sent, lambda: self.inner.send(value, pass_number, microbatch, keep=keep))
        return any(tensor.requires_grad for tensor in tensors_of(value))

    def release(self, keep: int = 0) -> None:
        self._waiting(lambda inner: inner.release(keep))

    def flush(self, keep: int = 0) -> None:
        self._waiting(lambda inner: inner.flush(keep))

    def _waiting(self, wait: Callable[[OutChannel], None]) -> None:
        with self._log.lock:  # while the log is repeated, nothing else may use the connections of the new session
            failures, inner = self._log.failures, self.inner
        try:
            wait(inner)
        except Exception as error:  # the repair sends again the values that have not arrived
            self._log.overcome(failures, error)


@dataclass(frozen=True)
class _LoggedValue:
    """A copy of a value that the driver has sent."""

    sender: LoggedSender
    copy: Any
    number: int
    microbatch: int
    keep: int | None
    size_bytes: int
    is_answered = True
    meets_replicas = False

    def run_again(self) -> None:
        self.sender.inner.send(self.copy, self.number, self.microbatch, keep=self.keep)


class LoggedReceiver(InChannel):
    """Receives the values of one worker, and notes fingerprints of them in the log.

    Args:
        log: The driver's log.
        peer: The rank of the worker.
        channel: The channel from it.
        stage: The stage of the worker in words.
    """

    def __init__(self, log: Log, peer: int, channel: int, stage: str) -> None:
        self._log, self.peer, self._channel, self.stage = log, peer, channel, stage
        self.inner: InChannel

    def open(self, transport: Transport) -> None:
        """Use the connections of a session."""
        self.inner = transport.receiver(self.peer, self._channel)

    def receive(self, pass_number: int, microbatch: int) -> Any:
        log = self._log
        while True:
            with log.lock:  # see LoggedSender._waiting
                failures, inner = log.failures, self.inner
            try:
                value = inner.receive(pass_number, microbatch)
            except Exception as error:
                log.overcome(failures, error)
                continue
            with log.lock:
                if log.failures is failures:  # else the new workers send the value again
                    log.note(_Received(self, pass_number, microbatch, fingerprint(value)))
                    return value


@dataclass(frozen=True)
class _Received:
    """The fingerprint of a value that the driver has received, to compare it with the value of a repetition."""

    receiver: LoggedReceiver
    number: int
    microbatch: int
    fingerprint: Fingerprint
    size_bytes = 0
    is_answered = True
    meets_replicas = False

    def run_again(self) -> None:
        value = self.receiver.inner.receive(self.number, self.microbatch)
        if fingerprint(value) != self.fingerprint:
            raise NotRepeated(self.receiver.peer, self.receiver.stage, self.number, self.microbatch)

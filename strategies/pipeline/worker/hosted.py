"""A stage on a worker: its layers and its part of the optimizers. It implements the commands of the driver."""

import pickle
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from strategies.commands.host import Order
from strategies.common.activity import Activity
from strategies.common.autograd import GatheredGradients
from strategies.common.stage_layers import describe
from strategies.common.torch_compat import unscale_grads
from strategies.common.trees import on_cpu
from strategies.optim.calls import Draws, MethodCall, set_hyperparameters
from strategies.optim.gradients import norms_of_gradients
from strategies.optim.restricted import (
    move_states,
    parameters_of,
    put_together,
)
from strategies.pipeline.control.commands import Parameters, StageCommands
from strategies.pipeline.control.operations import GradientOf, Name, TensorOperation, WorkerTensor
from strategies.pipeline.control.parts import Part, PartKind, Piece, bytes_of, on_shelf
from strategies.pipeline.optim.replicas import Averaging, SharedSteps, connected
from strategies.pipeline.schedule.operations import Row
from strategies.pipeline.schedule.tables import Action
from strategies.pipeline.stage.action_recorder import ActionRecorder
from strategies.pipeline.stage.edges import Edges
from strategies.pipeline.stage.layers import PassContext
from strategies.pipeline.stage.out_of_memory import explaining
from strategies.pipeline.stage.passes import Pass
from strategies.pipeline.stage.records import ProcessRecords
from strategies.pipeline.stage.side_outputs import SideOutputs
from strategies.pipeline.stage.stage import Stage, chunks_of
from strategies.pipeline.state.carriers import Carrier, Receive, StageSlots
from strategies.pipeline.state.held import HeldState
from strategies.pipeline.state.remote_operations import HeldValues
from strategies.pipeline.state.stage_state import StageState, differing
from strategies.pipeline.transport.journal import Comparison, JournaledTransport, Message, Way
from strategies.pipeline.transport.link import Receiver
from strategies.pipeline.transport.slots import SlotAddress
from strategies.pipeline.transport.ties import TiedParameters
from strategies.pipeline.worker.setup import StageSetup
from strategies.sharding import divided_layers
from strategies.sharding.divided_layers import TensorGroup
from strategies.sharding.gathered_layers import ReplicaGroup


@dataclass
class Repeated:
    """The state of a verification: the messages of the first computation, and the differences found.

    Attributes:
        first: What the stage sent and received the first time.
        recorder: What records the passes of the stage. It records the first computation only.
        state: The names of the tensors of its state that differ from the first time.
    """

    first: list[Message] | None
    recorder: ActionRecorder | None
    state: list[str] = field(default_factory=list)


_CPU = torch.device("cpu")
_row: Callable[[bytes], Row] = lru_cache(pickle.loads)
_CAPTURING = {
    PartKind.TENSORS: "teardown, handing over weights",
    PartKind.STATE_DICT: "save, handing over weights",
    PartKind.EXTRA_STATE: "teardown, handing over extra states",
    PartKind.GRADS: "handing over gradients",
    PartKind.ATTRIBUTES: "teardown, handing over attributes",
    PartKind.OBJECTS: "handing over objects of layers",
    PartKind.OPTIMIZER: "teardown, handing over optimizer states",
    PartKind.WHOLE_OPTIMIZER: "save, handing over optimizer states",
}
"""What a stage does while it puts a part of its state on the shelf."""

_PLACING = {
    PartKind.TENSORS: "taking over buffers",
    PartKind.ATTRIBUTES: "taking over attributes",
    PartKind.REQUIRES_GRAD: "taking over attributes",
    PartKind.STATE_DICT: "load, taking over weights",
    PartKind.OPTIMIZER: "load, taking over optimizer states",
}
"""What a stage does while it takes over a part of its state from the driver."""


class HostedStage(StageCommands):
    """A stage on a worker. :class:`~strategies.pipeline.control.commands.StageCommands` documents its methods.

    The methods are in the order of these commands.

    Args:
        setup: How the stage runs.
        state: The initial state of the stage.
        edges: The stage's ends of the edges between chunks.
        activity: Holds what the stage does at present.
        orders: Receives the driver's orders; ``None`` if all commands come over RPC.
    """

    def __init__(
        self,
        setup: StageSetup,
        state: StageState,
        edges: Edges,
        activity: Activity,
        orders: Receiver | None = None,
    ) -> None:
        device = torch.device(setup.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self._index, self._activity, self._orders = setup.index, activity, orders
        self._setup, self._edges, self._device = setup, edges, device
        transport = self._transport = edges.transport
        self._journal = transport if isinstance(transport, JournaledTransport) else None
        """Notes what a verified stage sends and receives."""
        self._slots = StageSlots(setup.index)
        self._trace: torch.profiler.profile | None = None
        self._repeated: Repeated | None = None
        optimizers = self._placed(state)
        replicas = setup.replicas
        self._replica_group = None if replicas is None else activity.wait(partial(replicas.join, setup.index))
        if replicas is not None and replicas.zero_stage == 3:
            assert self._replica_group is not None
            divided_layers.connect(ReplicaGroup(self._replica_group, activity.wait, self._note))
        if setup.layer_peers is not None:
            group = activity.wait(partial(setup.layer_peers.join, setup.index))
            divided_layers.connect(TensorGroup(group, activity.wait, self._note))
        self._begin(state, optimizers)
        if self._averaging is not None and state.random_state is None:
            self._averaging.share()

    def _placed(self, state: StageState) -> list[Optimizer]:
        """Move a state to the device of the stage; return its optimizers."""
        with explaining(describe(self._index, state.layers), state.layers, self._device, "set-up, with its parameters"):
            return state.place(self._device)

    def _begin(self, state: StageState, optimizers: list[Optimizer]) -> None:
        """Go on from a state, over the same connections."""
        setup, edges, activity, device = self._setup, self._edges, self._activity, self._device
        layers = state.layers
        ties: TiedParameters | None = None
        if setup.ties and edges.transport is not None:
            named = dict(layers.named_parameters(remove_duplicate=False))
            ties = TiedParameters(setup.index, setup.ties, named, edges.transport)
        self._stage = Stage(
            chunks_of(
                layers,
                edges.ports(),
                device,
                deferred_batch_norm=setup.deferred_batch_norm,
                call=setup.call,
                side_outputs=SideOutputs.of(setup.index, layers) if setup.reports_side_outputs else None,
            ),
            edges,
            ties=ties,
            activity=activity,
            name=describe(self._index, layers),
        )
        self._averaging: Averaging | None = None
        shared_steps: SharedSteps | None = None
        if self._replica_group is not None and setup.replicas is not None:
            parameters = list(layers.parameters())  # copies of tied parameters have no gradients at this point
            self._averaging, shared_steps = connected(
                self._replica_group,
                setup.replicas.zero_stage,
                optimizers,
                lambda: parameters,
                lambda: list(layers.buffers()),
                owners=state.owners,
                means=state.means,
                wait=activity.wait,
            )
        self.held = HeldState(state, optimizers, device, shared_steps)
        self._values = HeldValues(self.held.modules, self.held.computed)
        self._gathered: dict[int, GatheredGradients] = {}
        """Gradients of passes that have not been released, by the number of the pass."""
        if state.random_state is not None:
            state.random_state.restore()

    # Methods for the host

    def describe(self) -> str:
        return describe(self._index, self.held.layers)

    def announce_failure(self) -> None:
        if self._transport is not None:
            self._transport.fail()

    def abort_waits(self) -> None:
        """End all waits for other processes, because one of them has failed. Called on an RPC thread."""
        if self._transport is not None:
            self._transport.abort()

    def next_order(self) -> Order:
        """Wait for the driver's next order; see :meth:`~strategies.commands.host.Host.follow`."""
        assert self._orders is not None
        order: Order = pickle.loads(self._orders.receive(0, 0).numpy())
        return order

    # Passes

    def run(self, this: Pass, row: bytes) -> None:
        this.context.apply()
        if this.gathers:
            gathered = self._gathered[this.number] = GatheredGradients(self.held.layers.parameters())
            with gathered.gathering():
                self._stage.run(_row(row), this)
        else:
            operations = _row(row)
            if self._averaging is not None and any(isinstance(a, Action) and a.kind != "F" for a in operations):
                self._averaging.before_backward()
            self._stage.run(operations, this)

    def release(self, number: int, factor: float, kept: float) -> None:
        if self._averaging is not None:
            self._averaging.before_backward()
        self._gathered.pop(number).release(factor, kept)

    def discard(self, number: int) -> None:
        self._gathered.pop(number, None)
        self._stage.discard(number)

    def num_kept(self) -> int:
        return self._stage.num_kept

    # Single values, for stand-ins on the driver

    def value(self, reference: Name | GradientOf | WorkerTensor) -> Tensor | None:
        return self._values.value(reference)

    def compute(self, operation: TensorOperation, dtype: torch.dtype) -> None:
        torch.set_default_dtype(dtype)
        self._values.compute(operation)

    # Gradients

    def zero_grad(self, parameters: Parameters, *args: Any, **kwargs: Any) -> None:
        if isinstance(parameters, int):
            self.held.optimizers[parameters].zero_grad(*args, **kwargs)
        else:
            nn.ParameterList(self._parameters(parameters)).zero_grad(*args, **kwargs)

    def change_grads(self, parameters: Parameters, change: Callable[[Sequence[Tensor]], object]) -> None:
        if self._averaging is not None and not isinstance(parameters, int):  # a gradient from the driver is added
            self._averaging.before_backward()
        change(self._parameters(parameters))

    def _parameters(self, chosen: Parameters) -> Sequence[Tensor]:
        if isinstance(chosen, int):
            return parameters_of(self.held.optimizers[chosen])
        named = dict(self.held.modules[chosen.module].named_parameters())
        return [named[name] for name in chosen.names]

    def unscale_grads(self, optimizer: int, inv_scale: Tensor, allow_fp16: bool) -> float:
        found, device = torch.zeros((), device=self._stage.device), self._stage.device
        scaler = torch.amp.GradScaler(device.type)
        own = self.held.optimizers[optimizer]
        found_by_device = unscale_grads(scaler)(own, inv_scale.to(device), found, allow_fp16)
        return sum(found.item() for found in found_by_device.values())

    def grad_norms(self, optimizer: int, norm_type: float) -> dict[int, Tensor]:
        norms = norms_of_gradients(parameters_of(self.held.optimizers[optimizer]), norm_type)
        pairs = zip(self.held.numbers[optimizer], norms, strict=True)
        return {number: norm.cpu() for number, norm in pairs if norm is not None}

    def average_grads(self) -> None:
        assert self._averaging is not None
        self._activity.doing = "averaging gradients"
        with self._exchanging(self._averaged):
            self._averaging.average()

    def _averaged(self) -> list[Tensor]:
        """The values that replicas average or get from replica 0."""
        grads = [p.grad for p in self.held.layers.parameters() if p.grad is not None]
        values = [grad.coalesce().values() if grad.is_sparse else grad for grad in grads]
        return [*values, *self.held.layers.buffers()]

    # Optimizers

    def adopt(self, blob: bytes, numbers: list[int]) -> None:
        cls, attributes, states = pickle.loads(blob)
        named = dict(self.held.layers.named_parameters())
        for group in attributes["param_groups"]:
            group["params"] = [named[name] for name in group["params"]]
        attributes["state"].update({named[name]: state for name, state in states.items()})
        self.held.optimizers.append(put_together(cls, attributes))
        move_states(self.held.optimizers[-1])
        self.held.numbers.append(numbers)

    def step(
        self,
        optimizer: int,
        values: list[dict[str, Any]],
        scaling: dict[str, Tensor],
        dtype: torch.dtype,
        arguments: Mapping[str, Any],
    ) -> None:
        torch.set_default_dtype(dtype)
        self._activity.doing = "optimizer step"
        own, shared, recorder = self.held.optimizers[optimizer], self.held.shared_steps, self._stage.recorder
        if self._transport is not None:
            self._transport.release_sent()  # so that the step can use the memory of sent tensors
        if recorder is not None:
            recorder.begin()
        set_hyperparameters(own, values)
        vars(own).update(scaling)
        if shared is not None:
            shared.before_step(own)
        with explaining(self.describe(), self.held.layers, self._stage.device, "the optimizer step"), Draws(own):
            own.step(**arguments)
        for name in scaling:
            delattr(own, name)
        if shared is not None:
            self._activity.doing = "exchange of values after an optimizer step"
            with self._exchanging(lambda: parameters_of(own)):
                shared.after_step(own)
        if recorder is not None:
            recorder.end("step")

    def call_method(
        self, optimizer: int, call: MethodCall, values: list[dict[str, Any]], context: PassContext, grad: bool
    ) -> Any:
        self._activity.doing = f"method {call.name} of an optimizer"
        own, shared = self.held.optimizers[optimizer], self.held.shared_steps
        set_hyperparameters(own, values)
        if shared is not None:
            shared.before_step(own)
        with context.entered(grad=grad):
            result = call.on(own)
        if shared is not None:
            with self._exchanging(lambda: parameters_of(own)):
                shared.after_step(own)
        return None if result is own else on_cpu(result)

    # Parts of the state, some of them on the shelf

    def capture(self, parts: Mapping[int, Part]) -> list[Any]:
        trees = []
        for number, part in parts.items():
            self._activity.doing = _CAPTURING[part.kind]
            self.held.shelf[number], tree = on_shelf(self.held.capture(part))
            trees.append(tree)
        return trees

    def place(self, part: Part, content: Any) -> None:
        self._activity.doing = _PLACING[part.kind]
        self.held.place(part, content)

    def shelved(self, key: int, pieces: Sequence[Piece]) -> Tensor:
        tensors = self.held.shelf[key]
        return torch.cat([bytes_of(tensors[path])[start:stop].cpu() for path, start, stop in pieces])

    def copy_shelved(self, key: int) -> None:
        shelf = self.held.shelf
        shelf[key] = {path: tensor.to("cpu", copy=True) for path, tensor in shelf[key].items()}

    def free(self, key: int) -> None:
        self.held.computed.pop(key, None)
        self.held.shelf.pop(key, None)

    # Snapshots

    def snapshot(self, number: int, address: SlotAddress) -> None:
        if self._repeated is None:
            self._slots.write(address, number, self.held.whole())
        else:
            self._repeated.state += differing(self._slots.read(address, number, _CPU), self.held.whole())

    # Verification

    def start_journal(self, begin: tuple[int, SlotAddress] | None = None) -> None:
        assert self._journal is not None
        if begin is not None:
            self._activity.doing = "going back to a snapshot"
            self._repeated, (number, address) = Repeated(self._journal.take(), self._stage.recorder), begin
            state = self._slots.read(address, number)
            # A checkpoint may still read parts captured after the snapshot.
            state.shelf = {**self.held.shelf, **state.shelf}
            self._begin(state, self._placed(state))
        self._journal.begin()

    def compare(self) -> Comparison:
        repeated, self._repeated = self._repeated, None
        assert repeated is not None and self._journal is not None
        self._stage.recorder = repeated.recorder
        return Comparison(repeated.first, self._journal.take() or [], repeated.state)

    def _note(self, way: Way, value: Any) -> None:
        """Note a value that this stage gives to or gets from the same stage of other pipelines, if that is compared."""
        if self._journal is not None:
            self._journal.note_exchange(way, value)

    @contextmanager
    def _exchanging(self, tensors: Callable[[], Sequence[Tensor]]) -> Iterator[None]:
        """Context in which the other replicas change tensors of this stage."""
        if self._journal is None or not self._journal.is_open:
            yield
            return
        self._note("sent", tensors())
        yield
        self._note("received", tensors())

    # Profiling

    def record(self, goes_on: bool) -> ProcessRecords:
        new, recorder = ActionRecorder(self._stage.device), self._stage.recorder
        self._stage.recorder = new if goes_on and self._repeated is None else None
        return (recorder or new).recorded()

    def trace(self, options: Mapping[str, Any] | None) -> bytes | None:
        trace, self._trace, content = self._trace, None, None
        if trace is not None:
            trace.stop()
            with tempfile.TemporaryDirectory(prefix="relay-trace-") as directory:
                path = Path(directory) / "trace.json"
                trace.export_chrome_trace(str(path))
                content = path.read_bytes()
        if options is not None:
            self._trace = torch.profiler.profile(**options)
            self._trace.start()
            self._trace.add_metadata("stage", self.describe())
        return content


def taken(carrier: Carrier, activity: Activity, receive: Receive = lambda storages: None) -> StageState:
    """Take the state of a stage from its carrier.

    Args:
        carrier: The carrier.
        activity: Holds what the stage does at present.
        receive: Receives the values of storages that are not in a pickle.
    """
    activity.doing = "unpacking its layers"
    return carrier.take(receive)

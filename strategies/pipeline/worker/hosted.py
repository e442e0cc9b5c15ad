"""A worker's stage: its layers, its part of the optimizers, and the commands that the driver may send it."""

import pickle
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from strategies.common.activity import Activity
from strategies.common.autograd import GatheredGradients
from strategies.common.formatting import describe
from strategies.common.torch_compat import EXTRA_STATE_KEY_SUFFIX
from strategies.common.trees import flat, layouts, on_cpu
from strategies.optim.restricted import (
    put_together,
)
from strategies.pipeline.control.commands import Attributes, StageCommands
from strategies.pipeline.control.operations import Operation, Reference
from strategies.pipeline.optim.replicas import Averaging, SharedSteps
from strategies.pipeline.schedule.tables import Action
from strategies.pipeline.stage.layers import Layers, PassContext
from strategies.pipeline.stage.side_outputs import SideOutputs
from strategies.pipeline.stage.stage import Pass, Ports, Stage
from strategies.pipeline.state.mirror import plain_attributes, set_attributes
from strategies.pipeline.state.remote_operations import HeldValues
from strategies.pipeline.transport.ties import TiedParameters
from strategies.pipeline.worker.hosted_optimizers import HostedOptimizers
from strategies.pipeline.worker.payload import Cargo
from strategies.pipeline.worker.wiring import Wiring


class HostedStage(HostedOptimizers, StageCommands):
    """A stage on a worker. Its public methods are the commands of the control plane."""

    def __init__(self, cargo: Cargo, wiring: Wiring, activity: Activity) -> None:
        self._index, self._activity, wait = cargo.index, activity, activity.wait
        device = torch.device(cargo.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self._layers = cargo.layers.to(device)
        self._modules = [self._layers, *(_moved(copy, device) for copy in cargo.copies)]
        self._values = HeldValues(self._modules)
        self._optimizers = [put_together(*parts) for parts in cargo.optimizers]
        self._numbers = cargo.numbers
        self._wiring, self._outputs, self._input_grads = wiring, wiring.outputs, wiring.input_grads
        self._stage = Stage(
            Layers(
                self._layers,
                cargo.first_layer,
                device,
                deferred_batch_norm=cargo.deferred_batch_norm,
                call=cargo.call,
            ),
            Ports(wiring.inputs, wiring.outputs, wiring.output_grads, wiring.input_grads),
            activity=activity,
            side_outputs=SideOutputs.of(cargo.index, self._layers) if cargo.notes_side_outputs else None,
        )
        self._ties = TiedParameters(
            cargo.index,
            cargo.ties,
            dict(self._layers.named_parameters(remove_duplicate=False)),
            wiring.sender,
            wiring.receiver,
        )
        self._averaging: Averaging | None = None
        self._shared_steps = None
        if cargo.replicas is not None:
            parameters = list(self._layers.parameters())  # copies of tied ones have no gradients by then
            self._averaging = Averaging(
                wait(partial(cargo.replicas.join, cargo.index)),
                lambda: parameters,
                lambda: list(self._layers.buffers()),
                wait=wait,
            )
            self._averaging.share()
            if cargo.replicas.divide_states:
                self._shared_steps = SharedSteps(self._optimizers, self._averaging)
        self.shelf: dict[int, Any] = {}
        """Tensors set aside for a sharded checkpoint, or read from one."""
        self._trace: torch.profiler.profile | None = None
        self._passes: dict[int, tuple[Pass, list[Action]]] = {}
        self._gathered: dict[int, GatheredGradients] = {}
        for parameter in self._layers.parameters():
            parameter.grad = None

    def describe(self) -> str:
        """Stage and layers in words, for error reports."""
        return describe(self._index, self._layers, self._stage.first_layer)

    def tell_neighbours(self) -> None:
        """Tells every process that may wait for this stage that it failed."""
        for sender in (self._outputs, self._input_grads, *self._ties.senders):
            sender.fail()

    def forward(self, this: Pass, actions: list[Action], later: list[Action]) -> None:
        """Runs the forward part of a pass; keeps ``later`` for :meth:`backward`."""
        if this.number and self._index == 0:
            self._input_grads.flush()  # the driver has taken those of earlier passes
        this.context.apply()
        if this.grad:
            self._passes[this.number] = this, later
        self._stage.run(actions, this)
        self._wiring.settle()

    def evaluate(self, context: PassContext) -> None:
        """Runs passes without a backward part as they are announced on the data plane, until there are no more.

        A command for each of them would cost more than a small model computes.
        """
        next_pass, pass_on = self._wiring.next_pass, self._wiring.pass_on
        assert next_pass is not None and pass_on is not None
        context.apply()
        while (announced := self._activity.idle(next_pass)) is not None:
            pass_on(announced)
            actions = [Action("F", m, self._index) for m in range(announced.microbatches)]
            this = Pass(
                number=announced.number,
                microbatches=announced.microbatches,
                grad=False,
                recomputed=0,
                at_once=False,
                seed=announced.seed,
                context=context,
            )
            self._stage.run(actions, this)
        pass_on(None)

    def backward(self, number: int) -> None:
        """Runs the backward part of a pass."""
        this, actions = self._passes.pop(number)
        self._stage.run(actions, this)
        self._outputs.flush()  # they have arrived, or there would have been no gradients; so they need not be kept
        self._ties.move_gradients(number)
        self._wiring.settle()

    def interleave(self, this: Pass, actions: list[Action]) -> None:
        """Runs a whole pass; its gradients wait for :meth:`release`."""
        this.context.apply()
        gathered = self._gathered[this.number] = GatheredGradients(self._layers.parameters())

        def bounded() -> Iterator[Action]:
            for action in actions:
                yield action
                self._input_grads.flush(keep=self._wiring.limit)  # the driver has taken those before

        with gathered.gathering():
            self._stage.run(bounded(), this)
            self._ties.move_gradients(this.number)

    def release(self, number: int, factor: float) -> None:
        """Adds the gradients of a pass, times ``factor``, to those of the parameters."""
        self._gathered.pop(number).release(factor)

    def start_trace(self, options: Mapping[str, Any]) -> None:
        """Has torch's profiler record what this thread does.

        Args:
            options: Arguments of ``torch.profiler.profile``.
        """
        self._trace = torch.profiler.profile(**options)
        self._trace.start()
        self._trace.add_metadata("stage", self.describe())

    def stop_trace(self) -> bytes | None:
        """Ends the recording; the trace in Chrome's format, or ``None`` if nothing has been recorded."""
        trace, self._trace = self._trace, None
        if trace is None:
            return None
        trace.stop()
        with tempfile.TemporaryDirectory(prefix="relay-trace-") as directory:
            path = Path(directory) / "trace.json"
            trace.export_chrome_trace(str(path))
            return path.read_bytes()

    def share_values(self, number: int) -> None:
        """Sends or takes over the values of tied parameters ahead of a pass."""
        self._ties.share_values(number)

    def discard(self, number: int) -> None:
        """Forgets a pass that will have no backward part."""
        self._passes.pop(number, None)
        self._gathered.pop(number, None)
        self._stage.discard(number)
        self._wiring.forget(number)

    def num_kept(self) -> int:
        """How many micro-batches wait for their backward pass."""
        return self._stage.num_kept

    def set_attributes(self, attributes: Attributes) -> None:
        """Sets plain attributes of modules, such as their mode."""
        set_attributes(self._layers, attributes)

    def attributes(self) -> list[dict[str, Any]]:
        """The plain attributes of each module."""
        return plain_attributes(self._layers)

    def set_requires_grad(self, flags: Sequence[bool]) -> None:
        """Sets ``requires_grad`` of each parameter, in the order of ``parameters()``."""
        for parameter, flag in zip(self._layers.parameters(), flags, strict=True):
            parameter.requires_grad_(flag)

    def adopt(self, blob: bytes, numbers: list[int]) -> None:
        """Takes in a part of one more optimizer, in which this stage's parameters stand by their names."""
        cls, attributes = pickle.loads(blob)
        named = dict(self._layers.named_parameters())
        for group in attributes["param_groups"]:
            group["params"] = [named[name] for name in group["params"]]
        self._optimizers.append(put_together(cls, attributes))
        self._numbers.append(numbers)

    def average_grads(self) -> None:
        """Averages the gradients over the replicas of this stage; see :meth:`Averaging.average`."""
        assert self._averaging is not None
        self._activity.doing = "averaging gradients"
        self._averaging.average()

    def zero_grads(self, names: Sequence[str], set_to_none: bool, module: int = 0) -> None:
        """Clears the gradients of parameters, as ``zero_grad`` of a module that holds them."""
        named = dict(self._modules[module].named_parameters())
        nn.ParameterList(named[name] for name in names).zero_grad(set_to_none)

    def load_grads(self, grads: Mapping[str, Tensor | None]) -> None:
        """Takes over what :meth:`grads` gave."""
        for name, parameter in self._layers.named_parameters():
            grad = grads[name]
            parameter.grad = None if grad is None else grad.to(parameter.device)

    def grads(self) -> dict[str, Tensor | None]:
        """The gradient of each parameter, by its name in the whole module."""
        return {name: None if p.grad is None else p.grad.cpu() for name, p in self._layers.named_parameters()}

    def value(self, name: str, module: int = 0) -> tuple[Tensor | None, bool]:
        """The values of a parameter or buffer, and whether it is a buffer with a place in autograd's graph."""
        path, _, own = name.rpartition(".")
        holder = self._modules[module].get_submodule(path)
        if (parameter := holder._parameters.get(own)) is not None:
            return parameter.detach().cpu(), False
        buffer = holder._buffers.get(own)
        return (None, False) if buffer is None else (buffer.detach().cpu(), buffer.requires_grad)

    def add_gradient(self, name: str, grad: Tensor, module: int = 0) -> None:
        """Adds to the gradient of a parameter what came of its use on the driver."""
        parameter = self._modules[module].get_parameter(name)
        grad = grad.to(parameter.device)
        parameter.grad = grad if parameter.grad is None else parameter.grad + grad

    def gradient(self, name: str, module: int = 0) -> Tensor | None:
        """The gradient of a parameter."""
        grad = self._modules[module].get_parameter(name).grad
        return None if grad is None else grad.cpu()

    def compute(self, operation: Operation, dtype: torch.dtype) -> None:
        """Carries out an operation of the driver on values of this stage, with the driver's default type."""
        torch.set_default_dtype(dtype)
        self._values.compute(operation)

    def held_value(self, reference: Reference) -> Tensor:
        """The values of a tensor of this stage, on the CPU."""
        return self._values.tensor(reference).cpu()

    def free_value(self, number: int) -> None:
        """Lets go of what an operation has computed."""
        self._values.free(number)

    def set_buffers(self, buffers: Mapping[str, Tensor]) -> None:
        """Puts tensors into the places of buffers."""
        for name, buffer in buffers.items():
            holder, _, leaf = name.rpartition(".")
            self._layers.get_submodule(holder)._buffers[leaf] = buffer.to(self._stage.device)

    def module_state(self, module: int = 0) -> dict[str, Any]:
        """The ``state_dict`` of the layers, or of those of a copy of the model, on the CPU."""
        return dict(on_cpu(self._modules[module].state_dict()))

    def module_layout(self, module: int = 0) -> dict[str, Any]:
        """The same with layouts in place of tensors."""
        return dict(layouts(self._modules[module].state_dict()))

    def load_module_state(self, state: Mapping[str, Any], module: int = 0) -> None:
        """Loads what :meth:`module_state` gave."""
        self._modules[module].load_state_dict(state, strict=False)  # the driver tells what is missing

    def shelve(self, number: int, names: Mapping[str, str], copies: bool) -> None:
        """Sets tensors aside, to be written as they are now.

        Args:
            number: Place on the shelf.
            names: The names under which they will be written, and those which they have here.
            copies: Whether something may change them before they are written.
        """
        states = {k: {"state": self.whole_optimizer_states(k)} for k in range(len(self._optimizers))}
        own = flat({"state_dict": self.module_state(), "optimizer_states": states})
        self.shelf[number] = {name: own[here].clone() if copies else own[here] for name, here in names.items()}

    def load_shelved_optimizer_states(self, number: int) -> None:
        """Loads states of all optimizers that have been put on the shelf."""
        for k, state in self.shelf.pop(number).items():
            self.load_optimizer_states(k, state["state"])

    def tensors(self, module: int = 0) -> dict[str, Tensor]:
        """Every parameter and buffer that there is, also those that ``state_dict`` leaves out, on the CPU."""
        layers = self._modules[module]
        named = [*layers.named_parameters(), *layers.named_buffers(remove_duplicate=False)]
        return {name: tensor.detach().cpu() for name, tensor in named}

    def extra_state(self) -> dict[str, Any]:
        """What the layers' own ``get_extra_state`` adds to a ``state_dict``."""
        state = self._layers.state_dict()
        return {name: value for name, value in state.items() if name.endswith(EXTRA_STATE_KEY_SUFFIX)}


def _moved(copy: nn.Sequential, device: torch.device) -> nn.Sequential:
    """A copy that was on the CPU stays there, which is how averages are kept out of the memory of a GPU."""
    tensors = (*copy.parameters(), *copy.buffers())
    return copy if all(tensor.device.type == "cpu" for tensor in tensors) else copy.to(device)


def unpack(blob: bytes, wire: Callable[[Cargo], Wiring], activity: Activity) -> HostedStage:
    """Makes a stage of a pickled :class:`Cargo`, connected by ``wire``."""
    cargo = pickle.loads(blob)
    assert isinstance(cargo, Cargo)
    return HostedStage(cargo, wire(cargo), activity)

"""The user's optimizers over all stages: steps, gradients and states, as if every parameter were on the driver.

The user's optimizer objects step the parameters of the driver. Each worker has copies of them, restricted to the
parameters of its stage.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from strategies.common.patching import replaced
from strategies.common.torch_compat import changed_before_loading, tree_map_only, without_load_pre_hooks
from strategies.optim.calls import (
    MethodCall,
    follow_methods,
    follow_steps,
    hyperparameters,
    own_code,
    runs_own_code,
    same_result,
)
from strategies.optim.restricted import (
    check_optimizer_state,
    in_order,
    narrowed,
    parameters_of,
    part_of,
)
from strategies.pipeline.construction.stored import References
from strategies.pipeline.control.client import RemoteStage
from strategies.pipeline.control.commands import StageCommands
from strategies.pipeline.control.parts import Part, PartKind
from strategies.pipeline.control.shelf import ShelvedPart
from strategies.pipeline.optim.replicas import SharedSteps
from strategies.pipeline.stage.action_recorder import ActionRecorder
from strategies.pipeline.stage.layers import PassContext
from strategies.sharding.divided_layers import DividedModel, tensor_group


class PipelineOptimizers:
    """Applies steps and other changes of the user's optimizers to every connected stage.

    The object outlives a connection: hooks on the user's optimizers refer to it, and a pipeline that starts new workers
    after an error connects it to the new workers.

    Args:
        optimizers: The optimizers. Every worker gets its part of them.
        locate: Names a parameter and the stage that holds it, for messages.
        prepare: Called before a step or another use of gradients; all stages take part in it then, and gradients are
            averaged over replicas.
        renew: Called before a call of any other method; starts new workers after an error that user code has caught.
        recorder: Returns what records the steps on the driver; ``None`` while no step is recorded.
        skips_infinite_steps: Whether a gradient scaler skips steps with infinite gradients. In that case no warning
            reports them.
        divided: How several pipelines divide parameters; ``None`` if they do not.
    """

    def __init__(
        self,
        optimizers: Iterable[Optimizer],
        locate: Callable[[Tensor], str],
        prepare: Callable[[], None],
        *,
        renew: Callable[[], None] = lambda: None,
        recorder: Callable[[], ActionRecorder | None] = lambda: None,
        skips_infinite_steps: bool = False,
        divided: DividedModel | None = None,
    ) -> None:
        self.optimizers, self.locate, self.prepare, self._renew = list(optimizers), locate, prepare, renew
        self.skips_infinite_steps, self.divided = skips_infinite_steps, divided
        self.num_steps = 0
        """Number of steps and other calls so far that changed parameters."""
        self.numbers: list[list[list[int]]] = []
        """For each stage on a worker and each optimizer, the numbers of the parameters of the stage."""
        self.remotes: Sequence[RemoteStage] = ()
        self._shipped = [_group_sizes(optimizer) for optimizer in self.optimizers]
        self.shared_steps: SharedSteps | None = None
        self.references = References()
        self._recorder = recorder

    def connect(
        self,
        remotes: Sequence[RemoteStage],
        numbers: Sequence[list[list[int]]],
        *,
        shared_steps: SharedSteps | None = None,
    ) -> None:
        """Connect the optimizers to stages on workers until :meth:`end`. The workers have received their parts.

        Args:
            remotes: The stages.
            numbers: For each stage and each optimizer, the numbers of the parameters of the stage.
            shared_steps: Divides the optimizer states and steps of the driver's stage among its replicas; ``None`` if
                they are not divided.
        """
        self.remotes, self.numbers = tuple(remotes), list(numbers)
        self.shared_steps = shared_steps

    @property
    def are_divided(self) -> bool:
        """Whether other processes perform a part of each step."""
        return bool(self.remotes) or self.shared_steps is not None

    def drop_shipped_states(self) -> None:
        """Delete the states that the workers have received, to free memory on the driver."""
        for optimizer in self.optimizers:
            for parameter in [p for p in optimizer.state if isinstance(p, Tensor) and p.is_meta]:
                del optimizer.state[parameter]

    def end(self) -> None:
        """Disconnect the stages. The optimizers are whole again, except for states that replicas have divided."""
        self.remotes, self.numbers = (), []
        if self.shared_steps is not None:
            self.shared_steps.close()
            self.shared_steps = None

    def add(self, optimizer: Optimizer, numbers: list[list[int]]) -> None:
        """Add an optimizer, with the numbers of its parameters on each worker's stage."""
        self.optimizers.append(optimizer)
        self._shipped.append(_group_sizes(optimizer))
        for own, new in zip(self.numbers, numbers, strict=True):
            own.append(new)

    def step_remotes(self, optimizer: Optimizer, arguments: Mapping[str, Any]) -> None:
        """Step the workers' parts with the current hyperparameters of the optimizer, without waiting.

        Args:
            optimizer: The optimizer.
            arguments: The arguments of ``step``, without the closure.

        Raises:
            RuntimeError: If the parameters of the optimizer have changed since the start.
        """
        k = self.number_of(optimizer)
        if _group_sizes(optimizer) != self._shipped[k]:
            raise RuntimeError(
                f"{type(optimizer).__name__} has parameter groups of {_group_sizes(optimizer)} parameters, but the "
                f"pipeline started with {self._shipped[k]}; groups cannot be added while it runs (add_param_group). "
                "Give all parameters to the optimizer from the start, and freeze those that do not train yet."
            )
        self.prepare()
        values = hyperparameters(optimizer)
        set_by_scaler = {name: vars(optimizer).get(name) for name in ("grad_scale", "found_inf")}
        # A scaler sets grad_scale to None after unscale_().
        scaling = {name: value.cpu() for name, value in set_by_scaler.items() if value is not None}
        self.num_steps += 1
        for remote in self.remotes:
            remote.send(StageCommands.step, k, values, scaling, torch.get_default_dtype(), arguments)
        if (recorder := self._recorder()) is not None:
            recorder.begin()
        if self.shared_steps is not None:
            self.shared_steps.before_step(optimizer)

    def after_step(self, optimizer: Optimizer) -> None:
        """Send new values to the other replicas if they divide steps. Called after each step on the driver."""
        if self.shared_steps is not None:
            self.shared_steps.after_step(optimizer)
        recorder = self._recorder()
        if recorder is not None and not runs_own_code(optimizer):  # otherwise this is a part of a step
            recorder.end("step")

    def call_method(self, optimizer: Optimizer, call: MethodCall) -> Any:
        """Call a method of an optimizer on every stage, such as the switch between training and evaluation weights.

        The workers call the method before their next command, with the current hyperparameters of the optimizer.

        Raises:
            RuntimeError: If the method returns different values on different stages.
        """
        k = self.number_of(optimizer)
        self._renew()
        here = [p for p in parameters_of(optimizer) if not p.is_meta]
        context = PassContext.capture(here[0].device.type if here else "cpu")
        sent = call, hyperparameters(optimizer), context, torch.is_grad_enabled()
        self.num_steps += 1
        with narrowed(optimizer, here):
            if self.shared_steps is not None:
                self.shared_steps.before_step(optimizer)
            result = call.on(optimizer)
            if self.shared_steps is not None:
                self.shared_steps.after_step(optimizer)
        if result is None or result is optimizer:
            for remote in self.remotes:
                remote.send(StageCommands.call_method, k, *sent)
            return result

        def ask() -> dict[str, Any]:
            answers = {remote.description: remote.ask(StageCommands.call_method, k, *sent) for remote in self.remotes}
            return {description: answer.wait() for description, answer in answers.items()}

        return same_result(optimizer, call, result, ask)

    def number_of(self, optimizer: Optimizer) -> int:
        """Return the number of an optimizer.

        Raises:
            ValueError: If the pipeline started without it.
        """
        numbers = [k for k, own in enumerate(self.optimizers) if own is optimizer]
        if not numbers:
            raise ValueError(
                f"this {type(optimizer).__name__} is not one of the optimizers with which the pipeline started, which "
                "are those that configure_optimizers returned"
            )
        return numbers[0]

    def start_unscaling(self, optimizer: Optimizer, inv_scale: Tensor, allow_fp16: bool) -> list[Callable[[], float]]:
        """Start to divide the workers' gradients by the loss scale.

        Returns:
            For each worker, a function that waits and then returns zero if all gradients are finite.
        """
        k = self.number_of(optimizer)
        self.prepare()
        return [remote.ask(StageCommands.unscale_grads, k, inv_scale, allow_fp16).wait for remote in self.remotes]

    def anywhere(self, found: Tensor) -> None:
        """Set a scalar that is 0 or 1 to 1 if it is 1 in any pipeline whose gradients this process does not have."""
        if self.shared_steps is not None:
            self.shared_steps.any_replica(found)
        if self.divided is not None:
            found.copy_(torch.stack(tensor_group().parts(found)).amax(0))

    def zero_grad_remotes(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        """Clear the workers' gradients before the next command of each stage, with the arguments of ``zero_grad``."""
        for remote in self.remotes:
            remote.send(StageCommands.zero_grad, self.number_of(optimizer), *args, **kwargs)

    def state_dict(
        self, optimizer: Optimizer, taken: Callable[[ShelvedPart], Any] = ShelvedPart.values
    ) -> dict[str, Any]:
        """Return the state dict that the optimizer would have in one process, gathered stage by stage.

        It is whole when the user's post-hooks get it, and where an overridden ``state_dict`` calls torch's method.

        Args:
            optimizer: The optimizer.
            taken: Returns the optimizer states in the shelved part of a remote stage; by default with their values.
        """
        k, is_whole = self.number_of(optimizer), False

        def gather(_: Optimizer, state: dict[str, Any]) -> None:
            nonlocal is_whole
            is_whole = True
            state["state"] = self._gathered(optimizer, k, state["state"], taken)

        hook = optimizer.register_state_dict_post_hook(gather, prepend=True)
        try:
            state = type(optimizer).state_dict(optimizer)  # the object's ``state_dict`` calls this method
        finally:
            hook.remove()
        if not is_whole:  # an overridden method has not called torch's
            gather(optimizer, state)
        return state

    def _gathered(
        self, optimizer: Optimizer, k: int, states: dict[Any, Any], taken: Callable[[ShelvedPart], Any]
    ) -> dict[Any, Any]:
        """Return the states of parameters of all stages, given those on the driver."""
        if self.shared_steps is not None:
            states = self.shared_steps.gathered(self.shared_steps.own_part(optimizer, states))
        for remote, numbers in zip(self.remotes, self.numbers, strict=True):
            part = ShelvedPart.of(remote, Part(PartKind.WHOLE_OPTIMIZER, k))
            if foreign := sorted(part.tree.keys() - set(numbers[k])):
                raise RuntimeError(
                    f"{remote.description} returned states of optimizer {k} that do not belong to its parameters: "
                    f"unexpected {foreign}. They cannot be saved in a checkpoint."
                )
            states.update(taken(part))
        return in_order(states)

    def load_state_dict(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Load a whole state dict, as the user's pre-hooks change it. Each stage gets the states of its parameters.

        The user's post-hooks are called when every stage has its states. An overridden ``load_state_dict`` runs on
        every stage, for the states of its parameters.

        Raises:
            ValueError: If the state does not belong to the optimizer's parameters. Nothing is loaded in that case.
        """
        k = self.number_of(optimizer)
        state = changed_before_loading(optimizer, state)
        check_optimizer_state(optimizer, state, f"optimizer {k}, a {type(optimizer).__name__}")
        here = [number for number, p in enumerate(parameters_of(optimizer)) if not p.is_meta]
        for remote, numbers in zip(self.remotes, self.numbers, strict=True):
            own = part_of(state["state"], numbers[k])
            states = tree_map_only(Tensor, self._where_stored, own)
            remote.ask(StageCommands.place, Part(PartKind.OPTIMIZER, k), states).wait()
        self.load_here(optimizer, {**state, "state": part_of(state["state"], here)})

    def _where_stored(self, tensor: Tensor) -> Any:
        """Return a reference to the file with a tensor's values, or the tensor on the CPU, for sending by RPC."""
        return self.references.stored(tensor) or tensor.detach().cpu()

    def load_here(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Load the states of parameters on the driver, from a state dict that pre-hooks have changed."""
        if self.shared_steps is not None:
            state = {**state, "state": self.shared_steps.own_part(optimizer, state["state"])}
        with without_load_pre_hooks(optimizer):
            type(optimizer).load_state_dict(optimizer, state)

    def take_back(self, k: int, states: Mapping[int, Any]) -> None:
        """Copy a worker's states into the user's optimizer. The parameters must have values in this process again."""
        optimizer = self.optimizers[k]
        parameters = parameters_of(optimizer)
        optimizer.state.update({parameters[number]: state for number, state in states.items()})
        for parameter in [p for p in parameters if p in optimizer.state]:  # the order of one process
            optimizer.state[parameter] = optimizer.state.pop(parameter)


def follow_optimizer(
    own: Optimizer,
    optimizers: PipelineOptimizers,
    *,
    holders: Iterable[Any] = (),
    refused: type[Exception] = RuntimeError,
    after_method: Callable[[], None] = lambda: None,
) -> list[Callable[[], None]]:
    """Make steps, ``zero_grad``, other methods and the state of the user's optimizer apply to all stages.

    Args:
        own: The user's optimizer.
        optimizers: The optimizers over all stages, including this one.
        holders: Wrappers of the optimizer with a separate ``zero_grad``, such as a ``LightningOptimizer``.
        refused: Type of the error for an optimizer that the stages cannot follow.
        after_method: Called after each call of a method that the optimizer's class adds to ``Optimizer``.

    Returns:
        Functions that undo this.
    """
    undo = [follow_steps(own, optimizers.step_remotes, is_divided=lambda: optimizers.are_divided, refused=refused)]
    for holder in (own, *holders):
        undo.append(replaced(holder, "zero_grad", partial(_zero_grad, own, optimizers, holder.zero_grad)))

    def call_method(optimizer: Optimizer, call: MethodCall) -> Any:
        result = optimizers.call_method(optimizer, call)
        after_method()
        return result

    undo += follow_methods(own, call_method, holders)
    undo.append(replaced(own, "state_dict", partial(optimizers.state_dict, own)))
    undo.append(replaced(own, "load_state_dict", partial(optimizers.load_state_dict, own)))
    return undo


def _zero_grad(
    own: Optimizer, optimizers: PipelineOptimizers, original: Callable[..., None], /, *args: Any, **kwargs: Any
) -> None:
    with own_code(own):
        original(*args, **kwargs)
    optimizers.zero_grad_remotes(own, *args, **kwargs)


def _group_sizes(optimizer: Optimizer) -> list[int]:
    return [len(group["params"]) for group in optimizer.param_groups]


def clears_as_torch_does(optimizer: Optimizer) -> bool:
    """Return whether ``zero_grad`` of an optimizer is torch's, apart from the changes of :func:`follow_optimizer`."""
    method: Any = optimizer.zero_grad
    if isinstance(method, partial) and method.func is _zero_grad:
        method = method.args[2]
    return getattr(method, "__func__", None) is Optimizer.zero_grad

"""``Pipe``: run an ``nn.Sequential`` as a pipeline in a hand-written training loop.

    inputs ──split──▶ partition 0 ──▶ partition 1 ──▶ ... ──join──▶ RRef(output)

A drop-in replacement for ``torch.distributed.pipeline.sync.Pipe``, which PyTorch removed in 2.4.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, overload

import torch
from torch import Tensor, nn
from torch.distributed import rpc
from torch.optim import Optimizer

from strategies.common.names import did_you_mean
from strategies.common.torch_compat import num_rpc_sessions_begun, rpc_is_initialized, rpc_workers
from strategies.launch.private_rpc import PrivateRpc
from strategies.launch.session import Session
from strategies.optim.restricted import parameters_of
from strategies.pipeline.optim.clipping import clip_grad_norm
from strategies.pipeline.pipe.local_engine import LocalEngine
from strategies.pipeline.pipe.rpc_partitions import RpcPartitions
from strategies.pipeline.pipe.with_device import WithDevice, layers_of, partitions_of
from strategies.pipeline.stage.layers import RECOMPUTE_MODES, PassContext
from strategies.pipeline.stage.microbatch.chunks import gather, scatter
from strategies.pipeline.stage.passes import Pass
from strategies.pipeline.stage.skip import verify_skippables


class Pipe(nn.Module):
    """Runs an ``nn.Sequential`` in micro-batches over several devices and processes.

    Each layer runs on the device of its parameters, or on the CPU if it has none. :class:`WithDevice` places a layer on
    another device. A layer that returns a tuple passes several arguments to the next layer, also within an inner
    ``nn.Sequential``. See :mod:`~strategies.pipeline.stage.calling` for lists and for layers that take the tuple as one
    argument.

    ``state_dict`` has the keys of ``module``. ``load_state_dict`` also accepts the keys of the original ``Pipe``
    (``partitions.0.1.weight``), for any division into partitions. The result of ``state_dict`` loads into ``module``.

    Random numbers of layers are seeded by (pass, micro-batch, layer) from the generator of the process, so dropout does
    not depend on placement or recomputation.

    Args:
        module: The layers.
        chunks: Maximum number of micro-batches of a batch.
        checkpoint: The micro-batches to recompute in the backward pass, so that only the inputs of partitions are kept:
            ``"always"``, ``"except_last"`` or ``"never"``. Has no effect in ``eval()`` mode.
        deferred_batch_norm: Update running statistics once per batch instead of once per micro-batch.

    Raises:
        TypeError: If ``module`` is not an ``nn.Sequential``, if skip connections do not match, or if an argument has a
            wrong type.
        ValueError: If a layer occurs twice or is on several devices, or an argument is out of range.
    """

    def __init__(
        self,
        module: nn.Sequential,
        chunks: int = 1,
        checkpoint: str = "except_last",
        deferred_batch_norm: bool = False,
    ) -> None:
        super().__init__()
        self.partitions: nn.ModuleList
        self.chunks, self.checkpoint = _checked_chunks(chunks), _checked_mode(checkpoint)
        if not isinstance(deferred_batch_norm, bool):
            raise TypeError(f"deferred_batch_norm must be True or False, got {deferred_batch_norm!r}")
        self.deferred_batch_norm = deferred_batch_norm
        _check_module(module)
        verify_skippables(module)
        _check_workers(module)
        self._rpc = PrivateRpc.needed()
        partitions = partitions_of(module, rpc.get_worker_info().name)
        self._places = [partition.place for partition in partitions]
        # Not a submodule, so that names equal those of the whole module.
        vars(self)["partitions"] = nn.ModuleList(partition.layers for partition in partitions)
        """The layers of each partition, an ``nn.Sequential`` with the names of the whole module. Hooks on partitions of
        this process run for each micro-batch, with the inputs and outputs of the partition."""
        self.devices = [partition.place.device for partition in partitions]
        """The device of each partition."""
        # Not with add_module, which refuses a layer with the name of an attribute, such as "chunks".
        self._modules.update(layers_of(partitions))
        self._built_of = self._parts()
        self._engine: LocalEngine | RpcPartitions
        if any(partition.place.worker for partition in partitions):
            self._engine = RpcPartitions(self, partitions, deferred_batch_norm=deferred_batch_norm)
        else:
            self._engine = LocalEngine(partitions, deferred_batch_norm=deferred_batch_norm)

    def forward(self, *inputs: Any) -> Any:
        """Run one batch.

        Args:
            inputs: Inputs of the first layer. Tensors ``[batch, ...]`` are split as by ``Tensor.chunk``; other values
                and :class:`NoChunk` are passed to every micro-batch. A batch with fewer rows than ``chunks`` gives
                fewer micro-batches.

        Returns:
            An ``RRef``, owned by this process, to the output of the last layer. Tensors are joined along their rows;
            other values become a list with one entry per micro-batch.

        Raises:
            TypeError: If no input is a tensor, or a partition returns no tensor.
            RuntimeError: If the inputs give different numbers of micro-batches.
            ValueError: If an input cannot be split, or is not on the device of the first partition.
        """
        if self._parts() != self._built_of:
            raise RuntimeError("a layer of Pipe has been replaced, added or removed; make a new Pipe of the new layers")
        parts = scatter(inputs, self.chunks)
        self._check_devices(inputs)
        if not self.partitions:
            return self._reference(inputs[0] if len(inputs) == 1 else inputs)
        this = Pass(
            number=0,
            microbatches=len(parts),
            grad=torch.is_grad_enabled(),
            checkpoint=self.checkpoint if torch.is_grad_enabled() and self.training else "never",
            seed=int(torch.randint(2**62, (), device="cpu")),
            context=PassContext.capture(max((device.type for device in self.devices), key=lambda kind: kind != "cpu")),
        )
        return self._reference(gather(self._engine.run(parts, this)))

    def train(self, mode: bool = True) -> "Pipe":
        """Set the mode of all layers and partitions."""
        super().train(mode)
        for module in (self.partitions, *self.partitions):
            module.training = mode
        return self

    def follow(self, optimizer: Optimizer) -> Optimizer:
        """Make the processes of all layers follow an optimizer over :meth:`parameters`.

        Parameters of layers on workers are stand-ins in this process. From now on, ``step``, ``zero_grad``,
        ``state_dict`` and ``load_state_dict`` of the optimizer apply to every process. Schedulers work as usual.

        Returns:
            The same optimizer. Has no effect if all layers are in this process.

        Raises:
            ValueError: If the optimizer cannot be divided over processes, is already followed, or has parameters that
                another ``Pipe`` has on workers.
        """
        if isinstance(self._engine, RpcPartitions):
            self._engine.followed.follow(optimizer)
        return optimizer

    def clip_grad_norm_(self, optimizer: Optimizer, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradients of all parameters of a followed optimizer by their total norm.

        Returns:
            The norm before clipping, a scalar.
        """
        if isinstance(self._engine, RpcPartitions):
            return clip_grad_norm(self._engine.followed.optimizers, optimizer, max_norm, norm_type)
        return nn.utils.clip_grad_norm_(parameters_of(optimizer), max_norm, norm_type)

    def _parts(self) -> list[Any]:
        """Return the layers, and the partitions with their layers; modules are compared by identity."""
        partitions = [(partition, *partition.children()) for partition in self.partitions]
        return [*self._modules.values(), *partitions]

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Rename keys of the original ``Pipe`` before loading."""
        theirs = [key[len(prefix) :] for key in state_dict if key.startswith(f"{prefix}partitions.")]
        if theirs and "partitions" not in self._modules:
            own = _own_names(theirs, self._modules)
            if own is None:
                error_msgs.append(
                    "the keys partitions.… are those of torch's original Pipe or of torchgpipe, but the saved layers "
                    "are not the layers of this Pipe: parameters or buffers differ in number or name"
                )
            else:
                values = {key: state_dict.pop(prefix + key) for key in theirs}
                state_dict.update({prefix + name: values[key] for key, name in own.items()})
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def _reference(self, output: Any) -> Any:
        reference: Any = rpc.RRef(output)
        reference._relay_rpc = self._rpc  # a private RPC session ends when no output refers to it
        return reference

    def _check_devices(self, inputs: tuple[Any, ...]) -> None:
        for place, value in enumerate(inputs):
            here = bool(self._places) and self._places[0].worker is None
            if here and isinstance(value, Tensor) and value.device != self.devices[0]:
                raise ValueError(
                    f"input {place} is on {value.device}, but the first layer is on {self.devices[0]}: move it there"
                )

    def __len__(self) -> int:
        return len(self._modules)

    @overload
    def __getitem__(self, index: int) -> nn.Module: ...

    @overload
    def __getitem__(self, index: slice) -> nn.Sequential: ...

    def __getitem__(self, index: int | slice) -> nn.Module:
        return nn.Sequential(OrderedDict(self.named_children()))[index]

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(module for module in self._modules.values() if module is not None)

    def cuda(self, device: Any = None) -> NoReturn:
        """Always raise an error, because each layer has a fixed device.

        Raises:
            TypeError: Always.
        """
        raise _moved("cuda")

    def cpu(self) -> NoReturn:
        """Always raise an error; see :meth:`cuda`."""
        raise _moved("cpu")

    def to(self, *args: Any, **kwargs: Any) -> "Pipe":
        """Cast the layers to another dtype.

        Raises:
            TypeError: If a device is given, or a tensor, which implies its device.
        """
        if "device" in kwargs or "tensor" in kwargs or isinstance(args[0] if args else None, str | int | Tensor):
            raise _moved("to")
        if args and isinstance(args[0], torch.device):
            raise _moved("to")
        super().to(*args, **kwargs)
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> "Pipe":
        for place in self._places:  # called when a module that contains this Pipe is moved
            if place.worker is not None:
                raise TypeError(
                    f"this would change layers on {place}, which only load_state_dict and optimizers can; convert them "
                    "before you create the Pipe"
                )
            if fn(torch.empty(0, device=place.device)).device != place.device:
                raise _moved("the call")
        super()._apply(fn, recurse)
        return self


def _checked_chunks(chunks: Any) -> int:
    try:
        number = int(chunks)
    except (TypeError, ValueError) as error:
        raise TypeError(f"chunks must be a whole number, got {chunks!r}") from error
    if number != chunks:
        raise TypeError(f"chunks must be a whole number, got {chunks!r}")
    if number < 1:
        raise ValueError(f"chunks must be at least 1, got {chunks}")
    return number


def _checked_mode(checkpoint: Any) -> str:
    mode = str(checkpoint)
    if mode not in RECOMPUTE_MODES:
        raise ValueError(f"Unknown checkpoint {mode!r}{did_you_mean(mode, RECOMPUTE_MODES)}")
    return mode


def _check_module(module: Any) -> None:
    if not isinstance(module, nn.Sequential):
        raise TypeError(f"Pipe takes an nn.Sequential, whose layers it can distribute, got {type(module).__name__}")
    layers = list(module)
    if len(set(layers)) < len(layers):
        twice = next(name for name, layer in module._modules.items() if layers.count(layer) > 1)
        raise ValueError(f"layer {twice} is in the nn.Sequential twice; each layer of Pipe has one place")


def _check_workers(module: nn.Sequential) -> None:
    """Check that the workers that ``WithDevice`` names are in the RPC session."""
    named = {layer.worker for layer in module if isinstance(layer, WithDevice) and layer.worker is not None}
    if not named:
        return
    if not rpc_is_initialized():
        raise RuntimeError(
            f"layers are placed on {', '.join(sorted(named))}, but RPC has not been initialised; call "
            "torch.distributed.rpc.init_rpc in every process first"
        )
    if PrivateRpc.has_been or Session.has_been or num_rpc_sessions_begun() > 1:
        raise RuntimeError(
            f"layers are placed on {', '.join(sorted(named))}, but this process had another RPC session before, and "
            "torch keeps using the first session for remote references (RRef); call init_rpc once, before the first "
            "Pipe of a process"
        )
    known = {info.name for info in rpc_workers()}
    if unknown := sorted(named - known):
        raise ValueError(f"WithDevice names {', '.join(unknown)}, but the RPC workers are {', '.join(sorted(known))}")


def _own_names(keys: Sequence[str], layers: Mapping[str, nn.Module | None]) -> dict[str, str] | None:
    """Return the names in the whole module of the tensors in a checkpoint of the original ``Pipe``.

    torchgpipe and fairscale wrote ``partitions.<partition>.<name in the whole module>``. torch wrote the index in the
    partition instead, and counted each layer of an inner ``nn.Sequential``. For any partition, the layers with tensors
    are in the same order.

    Args:
        keys: The keys of the checkpoint.
        layers: The layers of the whole module, by name.

    Returns:
        The name for each key, without the two buffers of deferred batch normalization, which are sums over the current
        batch; ``None`` if the layers differ.
    """
    sums = [key for key in keys if key.endswith((".sum", ".sum_squares")) and _sibling(key, "running_mean") in keys]
    for left_out in ([], sums):
        kept = [key for key in keys if key not in left_out]
        by_name = {key: key.split(".", 2)[-1] for key in kept}
        names = [f"{path}.{name}" for path, layer in layers.items() if layer is not None for name in layer.state_dict()]
        if sorted(by_name.values()) == sorted(names):
            return by_name
        saved, own = _by_place(kept), _by_layer(layers)
        if [set(tensors) for tensors in saved] == [set(tensors) for tensors in own]:
            return {saved[k][name]: own[k][name] for k in range(len(own)) for name in own[k]}
    return None


def _sibling(key: str, name: str) -> str:
    return f"{key.rpartition('.')[0]}.{name}"


def _by_place(keys: Iterable[str]) -> list[dict[str, str]]:
    """For each layer of torch's original with tensors, in order: the key of each tensor by its name in the layer."""
    found: dict[tuple[int, int], dict[str, str]] = {}
    for key in keys:
        partition, place, name = [*key.split(".", 3)[1:], "", ""][:3]
        if not (partition.isdecimal() and place.isdecimal()):
            return []
        found.setdefault((int(partition), int(place)), {})[name] = key
    return [found[place] for place in sorted(found)]


def _by_layer(layers: Mapping[str, nn.Module | None]) -> list[dict[str, str]]:
    """For each layer with tensors: the name of each tensor in the whole module by its name in the layer."""
    parts: dict[str, nn.Module] = {}
    for path, layer in layers.items():
        if isinstance(layer, nn.Sequential):
            parts.update({f"{path}.{name}": inner for name, inner in layer.named_children()})
        elif layer is not None:
            parts[path] = layer
    named = [{name: f"{path}.{name}" for name in part.state_dict()} for path, part in parts.items()]
    return [tensors for tensors in named if tensors]


def _moved(what: str) -> TypeError:
    return TypeError(
        f"{what} would move layers that have fixed devices in the pipeline; place each layer before you create the "
        "Pipe, with layer.to(device) or WithDevice"
    )

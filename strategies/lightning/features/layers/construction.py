"""Models built without memory: in ``configure_model``, in ``trainer.init_module()``, or on the ``meta`` device.

The driver has a recipe for each large tensor, and each process builds the layers of its stage. The weights of a
checkpoint for such layers stay in the file until the process that builds the layers reads them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from strategies.checkpoint.references import InSafetensors, Unread, references_in_file
from strategies.checkpoint.save_and_load import load_sharded, read_tensors
from strategies.common.transformers_compat import lazy_safetensors
from strategies.common.trees import flat, with_tensors
from strategies.lightning.compat import rank_zero_warn
from strategies.lightning.features.feature import Feature, PipelineArguments
from strategies.lightning.options import Options
from strategies.lightning.run import Preparation
from strategies.pipeline.construction.initialise import initialise
from strategies.pipeline.construction.stored import FileReference
from strategies.pipeline.construction.without_memory import Construction
from strategies.pipeline.partition.sequential import Pipelined
from strategies.pipeline.state.remote_tensor import RemoteParameter
from strategies.pipeline.state.stand_ins import replace_parameter, without_stand_ins


class ModelConstruction(Feature):
    """Makes recipes for models that are built without memory, and builds each layer in the process that holds it.

    Args:
        gather_on_end: The option ``gather_on_end``.

    Attributes:
        construction: Has the recipes.
        references: References to the weights of the checkpoint that is being loaded.
    """

    def __init__(self, gather_on_end: bool | None) -> None:
        self._gather_on_end = gather_on_end
        self.construction = Construction()
        self.references: dict[int, FileReference] = {}

    @classmethod
    def of(cls, options: Options) -> "ModelConstruction":
        """Return the feature, which every pipeline has."""
        return cls(options.gather_on_end)

    @contextmanager
    def without_memory(self) -> Iterator[None]:
        """Context in which models are built without memory for their large tensors."""

        def later(path: str, key: str, like: Tensor) -> Tensor:
            return self.construction.stored_tensor(InSafetensors.of(path, key), like)

        with torch.device("cpu"), lazy_safetensors(later), self.construction.without_memory():
            yield

    def gathers(self, module: Pipelined) -> bool:
        """Return whether the driver gets the whole model when the run ends; by default, if it held the whole model."""
        built_here = not any(tensor.is_meta for _, tensor in tensors_of(module))
        return built_here if self._gather_on_end is None else self._gather_on_end

    def initialise(self, model: nn.Module) -> None:
        """Initialise modules that the user built on the ``meta`` device and that got no values from a checkpoint."""
        if any(isinstance(tensor, RemoteParameter) for _, tensor in tensors_of(model)):
            return  # an earlier run has trained them
        if self.adopt(model) and (names := initialise(model, self.construction)):
            rank_zero_warn(
                f"{len(names)} modules of {type(model).__name__} are on the meta device, such as {names[0]!r}, and no "
                "checkpoint has given them values. They get initial values from _init_weights or reset_parameters, "
                "each with a seed made of its name."
            )

    def builder(self, model: nn.Module) -> Callable[[Iterable[nn.Module]], None]:
        """Return a function that builds modules of the model on the driver, if they were built without memory."""
        built: dict[int, torch.UntypedStorage] = {}
        return lambda modules: self.construction.build(modules, partial(replace_parameter, model, ()), built)

    def arguments(self, prepared: Preparation, optimizers: Sequence[Optimizer]) -> PipelineArguments:
        """Return how processes build their layers, and whether the layers return to the driver at the end."""
        return {"construction": self.construction, "gathers_on_end": prepared.gathers}

    # Checkpoints

    def adopt(self, model: nn.Module) -> bool:
        """Return whether tensors of a model have no memory, and prepare recipes for them."""
        without_stand_ins(model)
        found = [tensor for _, tensor in tensors_of(model) if tensor.is_meta]
        for tensor in found:
            self.construction.adopt(tensor)
        return bool(found)

    def refer_to(self, path: Path, checkpoint: dict[str, Any], weights_only: bool | None) -> None:
        """Let the processes read tensors of a checkpoint from its file."""
        self.references = references_in_file(path, checkpoint, weights_only)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Context in which values of the checkpoint can be loaded into tensors without memory."""
        with self.construction.references.used(self.references), self.construction.without_memory():
            yield

    def load_sharded(self, model: nn.Module, path: Path, weights_only: bool | None) -> tuple[dict[str, Any], Unread]:
        """Read a sharded checkpoint, except the weights of layers that have not been built.

        Returns:
            The checkpoint, and its tensors that have not been read.
        """
        checkpoint, shards = load_sharded(path, [], weights_only)
        state = checkpoint["state_dict"]
        later = {name for name, tensor in tensors_of(model) if tensor.is_meta}
        here = {
            name: tensor
            for name, tensor in flat(state, "state_dict").items()
            if name.removeprefix("state_dict.") not in later
        }
        checkpoint["state_dict"] = with_tensors(state, read_tensors(shards, here), "state_dict")
        unread = Unread(shards, checkpoint)
        self.references = unread.references
        return checkpoint, unread

    def take_references(self) -> Mapping[int, FileReference]:
        """Return the references to the checkpoint that is being loaded, and drop them."""
        references, self.references = self.references, {}
        return references


def tensors_of(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the name and the tensor of each parameter and buffer."""
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]

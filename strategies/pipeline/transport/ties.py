"""Tied parameters: one ``Parameter`` that several processes use, such as an embedding that is also the output layer.

One process owns a tied parameter: the driver if the driver uses it, otherwise the first stage that uses it. The owner
holds the optimizer state and updates the parameter; the other processes hold copies.

    after every backward pass        copies ──── gradients ───▶ owner, which adds them to its own
    before the next forward pass     owner  ───── value ──────▶ copies, if it may have changed

A copy sets its gradient to ``None`` after it has sent the gradient. So no gradient counts twice, for any number of
accumulated passes, and a norm of gradients includes the parameter once.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from strategies.common.stage_layers import StageLayers
from strategies.common.torch_compat import NormBase, version_of
from strategies.pipeline.transport.interface import Transport
from strategies.pipeline.transport.link import TIED_GRADIENTS, TIED_VALUES


@dataclass(frozen=True)
class Tie:
    """One tied parameter. A rank is the number of a stage; the driver's stage is the last.

    Attributes:
        owner: The rank that updates the parameter.
        names: For each rank whose stage uses the parameter, in order: its names in the pipelined module.
    """

    owner: int
    names: Mapping[int, tuple[str, ...]]

    @property
    def copies(self) -> list[int]:
        """The ranks that hold a copy."""
        return [rank for rank in self.names if rank != self.owner]


def owned_parameters(i: int, layers: nn.Module, ties: Iterable[Tie]) -> list[nn.Parameter]:
    """Return the parameters of stage ``i``, without its copies of parameters that another rank owns."""
    named = dict(layers.named_parameters(remove_duplicate=False))
    copies = {named[tie.names[i][0]] for tie in ties if i in tie.copies}
    return [parameter for parameter in layers.parameters() if parameter not in copies]


def find_ties(stages: Sequence[StageLayers], outside: Iterable[Tensor] = ()) -> list[Tie]:
    """Find the parameters that more than one process uses.

    Args:
        stages: The layers of each stage; those of the last stage are on the driver.
        outside: Parameters that the model uses outside of its stages, on the driver.

    Raises:
        ValueError: If two chunks use the same layer with running statistics, each of which would see only a part of the
            inputs; or if a layer changes a tied parameter in its forward pass.
    """
    uses: dict[int, dict[int, list[str]]] = {}
    norms: dict[nn.Module, tuple[int, int]] = {}
    for i, stage in enumerate(stages):
        for name, parameter in stage.named_parameters(remove_duplicate=False):
            uses.setdefault(id(parameter), {}).setdefault(i, []).append(name)
        for k, chunk in enumerate(stage.chunks):
            for name, module in chunk.named_modules(remove_duplicate=False):
                if not isinstance(module, NormBase) or not module.track_running_stats:
                    continue
                if norms.setdefault(module, (i, k)) != (i, k):
                    raise ValueError(
                        f"layer {name}, a {type(module).__name__}, is used by stage {norms[module][0]} and by stage {i}"
                        ", and two chunks of layers cannot share its running statistics. Use two layers, or choose a "
                        "balance that puts both uses into one chunk."
                    )
    driver, used_outside = len(stages) - 1, {id(parameter) for parameter in outside}
    ties = []
    for key, by_stage in uses.items():
        names = {i: tuple(names) for i, names in by_stage.items()}
        on_driver = driver in names or key in used_outside
        owner = driver if on_driver else min(names)
        if any(i != owner for i in names):
            ties.append(Tie(owner, names))
    _check_unchanged(stages, ties)
    return ties


def _check_unchanged(stages: Sequence[nn.Module], ties: Sequence[Tie]) -> None:
    for tie in ties:
        for i, names in tie.names.items():
            for name in names:
                layer = stages[i].get_submodule(name.rpartition(".")[0])
                if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.max_norm is not None:
                    raise ValueError(
                        f"parameter {name} of stage {i} is tied to another stage, but max_norm={layer.max_norm} of its "
                        "embedding changes it in the forward pass, which the other stage would not see. Leave max_norm "
                        "out, or choose a balance that puts both uses on one stage."
                    )


class TiedParameters:
    """Sends and receives gradients and values of the tied parameters of one process.

    Args:
        rank: The rank of this process.
        ties: All ties of the pipeline.
        parameters: Parameters by name: on a worker those of its stage, on the driver those of the pipelined module.
        transport: Opens channels to other processes.
    """

    def __init__(
        self,
        rank: int,
        ties: Sequence[Tie],
        parameters: Mapping[str, nn.Parameter],
        transport: Transport,
    ) -> None:
        self._rank, self._pairs = rank, pairs_of(ties, rank)
        """The owner and a holder of copies, for all exchanges of this process."""
        self._copied: dict[int, list[nn.Parameter]] = {}
        self._owned: dict[int, list[nn.Parameter]] = {}
        for owner, copy in self._pairs:
            for tie in ties:
                if tie.owner == owner and copy in tie.names:
                    name = tie.names.get(rank, tie.names[copy])[0]
                    peers, peer = (self._owned, copy) if owner == rank else (self._copied, owner)
                    peers.setdefault(peer, []).append(parameters[name])
        self._gradients_to = {peer: transport.sender(peer, TIED_GRADIENTS) for peer in self._copied}
        self._gradients_from = {peer: transport.receiver(peer, TIED_GRADIENTS) for peer in self._owned}
        self._values_to = {peer: transport.sender(peer, TIED_VALUES) for peer in self._owned}
        self._values_from = {peer: transport.receiver(peer, TIED_VALUES) for peer in self._copied}

    @property
    def versions(self) -> list[int]:
        """Version counters of the parameters that this process owns; an in-place change increases one of them."""
        return [version_of(parameter) for parameters in self._owned.values() for parameter in parameters]

    def move_gradients(self, number: int) -> None:
        """After backward pass ``number``, send gradients of copies to owners, which add them to their gradients.

        All processes run the exchanges in one order, so that they cannot deadlock if a send waits for its receive. The
        rank of a copy is lower than that of an owning driver, and higher than that of any other owner. So each process
        sends its gradients before it waits for any.
        """
        for owner, copy in sorted(self._pairs, key=lambda pair: (pair[1], pair[0])):
            if owner == self._rank:
                received = self._gradients_from[copy].receive(number, 0)
                for parameter, grad in zip(self._owned[copy], received, strict=True):
                    if grad is not None:
                        parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)
                continue
            self._gradients_to[owner].send([parameter.grad for parameter in self._copied[owner]], number, 0)
            for parameter in self._copied[owner]:
                parameter.grad = None
        for sender in (*self._gradients_to.values(), *self._values_to.values()):
            sender.flush()  # the values have arrived, since the gradients are here

    @torch.no_grad()
    def share_values(self, number: int) -> None:
        """Before forward pass ``number``, send the values of owned parameters, and receive those of copies.

        All processes run the exchanges in one order, as in :meth:`move_gradients`.
        """
        for owner, copy in self._pairs:
            if owner == self._rank:
                self._values_to[copy].flush()
                self._values_to[copy].send([p.detach() for p in self._owned[copy]], number, 0)
                continue
            values = self._values_from[owner].receive(number, 0)
            for parameter, value in zip(self._copied[owner], values, strict=True):
                parameter.copy_(value)

    def flush(self) -> None:
        """After a forward pass without a backward pass, wait until the owned parameters may be changed in place.

        The parameters are sent without a copy, and user code may restore weights in place right after an evaluation.
        """
        for sender in self._values_to.values():
            sender.flush()


def pairs_of(ties: Iterable[Tie], rank: int | None = None) -> list[tuple[int, int]]:
    """Return the owner and a holder of copies for all exchanges, or for those of one rank, in order."""
    pairs = {(tie.owner, copy) for tie in ties for copy in tie.copies}
    return sorted(pair for pair in pairs if rank is None or rank in pair)

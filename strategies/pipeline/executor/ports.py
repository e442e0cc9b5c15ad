"""The driver's connections: around its own stage, to stage 0 and back, and to whoever shares parameters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from strategies.common.waiting import Wait
from strategies.pipeline.stage.side_outputs import SideOutputs
from strategies.pipeline.stage.stage import Input, Mailbox, Output, Stage
from strategies.pipeline.transport.channel import FEED_TAG, Receiver, Sender
from strategies.pipeline.transport.ties import Tie, TiedParameters


@dataclass
class Ports:
    """The driver's connections: around its own stage, to stage 0 and back, and to whoever shares parameters."""

    feed: Output
    fed_back: Input
    inputs: Input
    outputs: Mailbox
    output_grads: Mailbox
    input_grads: Output
    ties: TiedParameters

    @property
    def senders(self) -> list[Sender]:
        return [port for port in (self.feed, self.input_grads) if isinstance(port, Sender)]

    def stage(
        self,
        layers: nn.Sequential,
        first_layer: int,
        device: torch.device,
        *,
        deferred_batch_norm: bool,
        side_outputs: SideOutputs,
    ) -> Stage:
        """The driver's own stage, which has these connections."""
        return Stage(
            layers,
            first_layer,
            device,
            inputs=self.inputs,
            outputs=self.outputs,
            output_grads=self.output_grads,
            input_grads=self.input_grads,
            deferred_batch_norm=deferred_batch_norm,
            side_outputs=side_outputs,
        )


def connected_ports(
    group: ProcessGroup, device: torch.device, ties: Sequence[Tie], parameters: Mapping[str, nn.Parameter], wait: Wait
) -> Ports:
    """The ports of a driver that has workers.

    Args:
        group: The data plane; ranks are numbers of stages.
        device: Where what arrives is put.
        ties: All ties of the pipeline.
        parameters: Those of the whole module, by name.
        wait: Calls what waits for a message.
    """
    last = group.size() - 1
    return Ports(
        feed=Sender(group, 0, tag=FEED_TAG, wait=wait),
        fed_back=Receiver(group, 0, device=device, tag=FEED_TAG, wait=wait),
        inputs=Receiver(group, last - 1, device=device, wait=wait),
        outputs=Mailbox(),
        output_grads=Mailbox(),
        input_grads=Sender(group, last - 1, wait=wait),
        ties=TiedParameters(
            last,
            ties,
            parameters,
            lambda peer, tag: Sender(group, peer, tag=tag, wait=wait),
            lambda peer, tag: Receiver(group, peer, device=device, tag=tag, wait=wait),
        ),
    )


def ports_of_one_stage() -> Ports:
    """The ports of a driver that is alone."""
    inputs, outputs, output_grads, input_grads = Mailbox(copies=True), Mailbox(), Mailbox(), Mailbox()
    nobody = TiedParameters(0, [], {}, _no_channel, _no_channel)
    return Ports(inputs, input_grads, inputs, outputs, output_grads, input_grads, nobody)


def _no_channel(peer: int, tag: int) -> Any:
    raise AssertionError(f"one stage shares nothing, yet wants a channel to {peer} with tag {tag}")

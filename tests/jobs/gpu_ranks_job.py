"""A user's script for two ranks of torchrun with a device each. Run as ``gpu_ranks_job.py RESULTS DEVICE PLANE``."""

import sys
from pathlib import Path

import torch
from parity import Small, fit
from torch import Tensor, nn

from strategies import RPCSequentialStrategy


class Place(nn.Module):
    """Notes the number of the device that it computes on, -1 for a CPU."""

    number: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("number", torch.tensor(-2))

    def forward(self, x: Tensor) -> Tensor:
        self.number.fill_(-1 if x.device.index is None else x.device.index)
        return x


class Placed(Small):
    def __init__(self) -> None:
        super().__init__()
        self.sequential_module[1], self.sequential_module[4] = Place(), Place()


def main(results: Path, accelerator: str, plane: str) -> None:
    strategy = RPCSequentialStrategy([3, 3], microbatches=3, schedule="1f1b", data_plane=plane)
    outcome = fit(Placed, strategy, 2, accelerator=accelerator)  # only the driver goes on
    devices = [int(number) for number in outcome.buffers.values()]
    torch.save({"losses": outcome.losses, "parameters": outcome.parameters, "devices": devices}, results)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])

"""DDP around a model that is split over two devices, for models that do not fit on one device.

``python -m examples.distributed_basics.ddp_split_model``

    rank 0:  device 0 ── hidden ──▶ device 1      each rank has a copy of the model on its own devices;
                │ gradients            │          DDP averages each half with the same half of the other rank
    rank 1:  device 2 ── hidden ──▶ device 3

With fewer than four GPUs, all devices are the CPU; only the device names change.
"""

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

from examples.distributed_basics.digits import accuracy, batches_of_all, digits, perceptron, sgd, share, train
from examples.distributed_basics.launch import launch, say


class SplitPerceptron(nn.Module):
    """The layers of ``perceptron()``: the first layers on one device, the last layer on another device."""

    def __init__(self, first: torch.device, second: torch.device) -> None:
        super().__init__()
        layers = perceptron()
        self.first, self.second = first, second
        self.begin, self.end = layers[:2].to(first), layers[2:].to(second)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.begin(images.to(self.first))
        return self.end(hidden.to(self.second)).to(images.device)  # autograd differentiates both moves


def devices_of(rank: int, num_processes: int) -> list[torch.device]:
    """Return two devices for each rank."""
    if torch.cuda.device_count() < 2 * num_processes:
        return [torch.device("cpu"), torch.device("cpu")]
    return [torch.device("cuda", 2 * rank), torch.device("cuda", 2 * rank + 1)]


def program(rank: int, num_processes: int) -> None:
    data, devices = digits(), devices_of(rank, num_processes)
    batches = batches_of_all(data, num_epochs=3)
    model = SplitPerceptron(*devices)
    # No device_ids: DDP accepts them only for a model on one device.
    train(DistributedDataParallel(model), sgd(model), share(batches, rank, num_processes))
    say(rank, f"on {devices[0]} and {devices[1]}: accuracy {accuracy(model, data):.3f}")

    single = perceptron()
    train(single, sgd(single), batches)
    for own, expected in zip(model.parameters(), single.parameters(), strict=True):
        assert_close(own.cpu(), expected, rtol=1e-9, atol=1e-9)


def main() -> None:
    launch(program, 2)
    print("ddp_split_model: two split models trained like one process with the whole model")


if __name__ == "__main__":
    main()

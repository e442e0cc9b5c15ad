"""Lightning's model for tests, with two layers to be divided."""

from pytorch_lightning.demos.boring_classes import BoringModel
from torch import Tensor, nn


class TwoLinear(BoringModel):
    """Two linear layers in ``sequential_module``."""

    def __init__(self) -> None:
        super().__init__()
        self.sequential_module = nn.Sequential(nn.Linear(32, 8), nn.Linear(8, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.sequential_module(x)

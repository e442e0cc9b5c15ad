"""Small models that call their blocks in the manner of torchvision, timm and of diffusion models.

Each takes images ``[rows, 3, 8, 8]`` and returns ``[rows, 4]``, without randomness and without running statistics.
"""

from itertools import pairwise

import torch
from torch import Tensor, nn

WIDTH = 16


class _Block(nn.Module):
    """Attention and a feed-forward network, each added to its input ``[rows, length, WIDTH]``."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attend = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.attend(y, y, y, need_weights=False)[0]
        x = x + self.mlp(self.norm2(x))
        return x


class _Patches(nn.Module):
    """What vision transformers have around their blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, kernel_size=4, stride=4)
        self.position = nn.Parameter(torch.randn(1, 4, WIDTH) * 0.02)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4)

    def embedded(self, images: Tensor) -> Tensor:
        return self.patches(images).flatten(2).transpose(1, 2) + self.position

    def classified(self, x: Tensor) -> Tensor:
        classes: Tensor = self.head(self.norm(x).mean(1))
        return classes


class TorchvisionViT(_Patches):
    """An ``nn.Sequential`` of blocks, called as one module."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(_Block() for _ in range(4)))

    def forward(self, images: Tensor) -> Tensor:
        return self.classified(self.layers(self.embedded(images)))


class TimmViT(_Patches):
    """A loop over the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([_Block() for _ in range(4)])

    def forward(self, images: Tensor) -> Tensor:
        x = self.embedded(images)
        for block in self.blocks:
            x = block(x)
        return self.classified(x)


class TorchvisionResNet(nn.Module):
    """Stages of residual blocks, in a list."""

    class Residual(nn.Module):
        """Two convolutions, added to the input."""

        def __init__(self, width: int, new_width: int) -> None:
            super().__init__()
            self.first, self.second = (nn.Conv2d(w, new_width, 3, padding=1) for w in (width, new_width))
            self.norm, self.shortcut = nn.GroupNorm(2, new_width), nn.Conv2d(width, new_width, 1)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = torch.relu(self.shortcut(x) + self.second(torch.relu(self.norm(self.first(x)))))
            return out

    def __init__(self) -> None:
        super().__init__()
        widths = [4, 8, 8, WIDTH]
        self.stem, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(WIDTH, 4)
        self.stages = nn.Sequential(*(nn.Sequential(self.Residual(a, b), nn.MaxPool2d(2)) for a, b in pairwise(widths)))

    def forward(self, images: Tensor) -> Tensor:
        classes: Tensor = self.head(self.stages(self.stem(images)).flatten(1))
        return classes


class DiT(_Patches):
    """Blocks whose norms are shifted and scaled by a condition (Peebles and Xie, 2023, arXiv:2212.09748)."""

    class Conditioned(_Block):
        """A block with a condition ``[rows, WIDTH]``."""

        def __init__(self) -> None:
            super().__init__()
            self.modulation = nn.Linear(WIDTH, 3 * WIDTH)

        def forward(self, x: Tensor, c: Tensor) -> Tensor:
            shift, scale, gate = self.modulation(torch.nn.functional.silu(c))[:, None].chunk(3, -1)
            y = self.norm1(x) * (1 + scale) + shift
            return x + gate * self.attend(y, y, y, need_weights=False)[0] + self.mlp(self.norm2(x))

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.Conditioned() for _ in range(4)])
        self.condition = nn.Linear(1, WIDTH)

    def forward(self, images: Tensor) -> Tensor:
        x, c = self.embedded(images), self.condition(images.mean((1, 2, 3))[:, None])
        for block in self.blocks:
            x = block(x, c)
        return self.classified(x)


class UNet(nn.Module):
    """A path down and a path up; each block up gets the output of a block down (Ronneberger et al., 2015)."""

    class Up(nn.Module):
        """Joins ``x`` and a skip connection."""

        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(16, 8, 3, padding=1)

        def forward(self, x: Tensor, skip: Tensor, time: Tensor) -> Tensor:
            return torch.nn.functional.silu(self.conv(torch.cat([x, skip + time[..., None, None]], 1)))

    class Down(nn.Module):
        """A convolution."""

        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(8, 8, 3, padding=1)

        def forward(self, x: Tensor, time: Tensor) -> Tensor:
            return torch.nn.functional.silu(self.conv(x) + time[..., None, None])

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.time, self.head = nn.Conv2d(3, 8, 1), nn.Linear(1, 8), nn.Linear(8, 4)
        self.down = nn.ModuleList([self.Down() for _ in range(3)])
        self.up = nn.ModuleList([self.Up() for _ in range(3)])

    def forward(self, images: Tensor) -> Tensor:
        time = self.time(images.mean((1, 2, 3))[:, None])
        x, skips = self.stem(images), []
        for block in self.down:
            x = block(x, time)
            skips.append(x)
        for block in self.up:
            x = block(x, skips.pop(), time)
        classes: Tensor = self.head(x.mean((2, 3)))
        return classes

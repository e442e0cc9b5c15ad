"""A pipeline of one stage in this process, comparison of gradients, and layers that fill a cache."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from strategies.common.random_seeds import Seeds
from strategies.pipeline.driver import Pipeline
from strategies.pipeline.executor.settings import Settings

CPU = torch.device("cpu")


@contextmanager
def pipelined(module: nn.Sequential, microbatches: int = 4, **settings: Any) -> Iterator[Pipeline]:
    """Within this, calling ``module`` runs the pipeline."""
    pipeline = Pipeline(module, [len(module)], [CPU], Settings(microbatches=microbatches, **settings), seeds=Seeds(1))
    pipeline.start()
    try:
        yield pipeline
    finally:
        pipeline.close()


def assert_same_gradients(layers: nn.Module, plain: nn.Module) -> None:
    for (name, actual), wanted in zip(layers.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(actual.grad, wanted.grad, rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


WIDTH = 4


class Cache:
    """Keys of the layers so far, as Hugging Face's caches have them; and the same again, in another way."""

    def __init__(self) -> None:
        self.keys: dict[int, Tensor] = {}
        self.updates = 0

    def update(self, layer: int, keys: Tensor) -> Tensor:
        self.updates += 1
        self.keys[layer] = torch.cat([*([self.keys[layer]] if layer in self.keys else []), keys], 1)
        return self.keys[layer]


class Block(nn.Module):
    """Attends to what the cache has for this layer; also to what it has for the first one, perhaps on another stage."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.key, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, given: tuple[Tensor, Cache]) -> tuple[Tensor, Cache]:
        x, cache = given
        keys = cache.update(self.number, self.key(x))
        assert cache.updates == self.number + 1
        return x + self.out((x @ keys.mT / keys.shape[1]) @ keys) + cache.keys[0], cache


class Last(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, 2)

    def forward(self, given: tuple[Tensor, Cache]) -> Tensor:
        return super().forward(given[0])

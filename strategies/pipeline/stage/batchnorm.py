"""Deferred BatchNorm: running statistics updated once per mini-batch instead of once per micro-batch.

Each layer still normalises each micro-batch separately, so outputs and gradients do not change. ``running_mean``,
``running_var`` and ``num_batches_tracked`` get the values of one update with all inputs of the layer in the mini-batch.
The pairwise update of Chan, Golub and LeVeque (1979, STAN-CS-79-773) combines the moments of the micro-batches.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from strategies.common.torch_compat import BatchNorm


@dataclass
class _Moments:
    """Count, mean ``[channels]`` and sum of squared deviations ``[channels]`` of a layer's inputs."""

    count: int
    mean: Tensor
    squares: Tensor

    @classmethod
    def of(cls, x: Tensor) -> "_Moments":
        dims = [dim for dim in range(x.dim()) if dim != 1]
        variance, mean = torch.var_mean(x, dims, correction=0)
        count = x.numel() // x.shape[1]
        return cls(count, mean, variance * count)

    def merged(self, other: "_Moments") -> "_Moments":
        count = self.count + other.count
        delta = other.mean - self.mean
        return _Moments(
            count,
            self.mean + delta * (other.count / count),
            self.squares + other.squares + delta.square() * (self.count * other.count / count),
        )


class DeferredStatistics:
    """Gathers the statistics of the BatchNorm layers of a stage over the micro-batches of a pass.

    Within :meth:`gathering`, the layers must run under :func:`~strategies.pipeline.stage.layers.Layers.run`.
    """

    def __init__(self, layers: nn.Module) -> None:
        self._moments: dict[BatchNorm, _Moments] = {}
        self._gathering = False
        self._hooks = [
            module.register_forward_pre_hook(self._take_moments)
            for module in layers.modules()
            if isinstance(module, BatchNorm) and module.running_mean is not None
        ]

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """Gather statistics within the body: a forward pass, but not its recomputation."""
        self._gathering = True
        try:
            yield
        finally:
            self._gathering = False

    def commit(self) -> None:
        """Update the running statistics with the gathered statistics, and clear those."""
        for norm, moments in self._moments.items():
            assert norm.running_mean is not None and norm.running_var is not None
            momentum = norm.momentum
            if norm.num_batches_tracked is not None:
                norm.num_batches_tracked.add_(1)
                if momentum is None:
                    momentum = 1.0 / float(norm.num_batches_tracked)
            assert momentum is not None
            unbiased = moments.squares / max(moments.count - 1, 1)
            norm.running_mean.lerp_(moments.mean.to(norm.running_mean.dtype), momentum)
            norm.running_var.lerp_(unbiased.to(norm.running_var.dtype), momentum)
        self._moments.clear()

    def forget(self) -> None:
        """Clear the statistics gathered in a pass that an error has ended."""
        self._moments.clear()

    def remove(self) -> None:
        """Remove the hooks from the layers."""
        for hook in self._hooks:
            hook.remove()

    def _take_moments(self, norm: nn.Module, args: tuple[Tensor, ...]) -> None:
        assert isinstance(norm, BatchNorm)
        if not (self._gathering and norm.training):
            return
        with torch.no_grad(), torch.autocast(args[0].device.type, enabled=False):
            x = args[0] if args[0].dtype == torch.float64 else args[0].float()
            moments = _Moments.of(x)
            seen = self._moments.get(norm)
            self._moments[norm] = moments if seen is None else seen.merged(moments)

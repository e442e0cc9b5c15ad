"""Names of Lightning that are private, or that stand for objects of the user."""

from pytorch_lightning.core.optimizer import LightningOptimizer, _MockOptimizer
from torch.optim import Optimizer


def unwrapped(optimizer: Optimizer | LightningOptimizer) -> Optimizer:
    """The user's own object behind Lightning's wrapper."""
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


def is_stand_in(optimizer: Optimizer | LightningOptimizer) -> bool:
    """Whether this is what Lightning puts in the place of ``None`` from ``configure_optimizers``; it trains nothing."""
    return isinstance(unwrapped(optimizer), _MockOptimizer)

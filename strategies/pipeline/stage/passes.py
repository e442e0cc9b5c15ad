"""What every stage must know about one pass of a batch through the pipeline."""

from dataclasses import dataclass

from strategies.pipeline.stage.layers import PassContext


@dataclass(frozen=True)
class Pass:
    """What every stage must know about one pass of a batch through the pipeline.

    Attributes:
        number: Number of the pass in its session.
        microbatches: Number of micro-batches of the batch.
        grad: Whether a backward pass may follow.
        recomputed: Number of micro-batches, from the first on, that are recomputed: the stage keeps only their inputs.
        at_once: Run the backward passes of all micro-batches in one call of autograd instead of one after another.
        seed: Base of the random seeds of the layers in this pass.
        context: The driver's settings, such as autocast and default dtype.
        limit: How many values on one channel may not have arrived yet; ``None``: no limit.
        splits: Whether backward passes have two parts.
        gathers: Whether gradients stay apart from ``.grad`` until they are released.
        shares: Whether values of tied parameters may have changed since the pass before.
    """

    number: int
    microbatches: int
    grad: bool
    recomputed: int
    at_once: bool
    seed: int
    context: PassContext
    limit: int | None = None
    splits: bool = False
    gathers: bool = False
    shares: bool = False

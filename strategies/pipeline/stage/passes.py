"""The properties of one pass of a batch through the pipeline, which every stage must know."""

from dataclasses import dataclass

from strategies.pipeline.stage.layers import PassContext


@dataclass(frozen=True)
class Pass:
    """The properties of one pass of a batch through the pipeline.

    Attributes:
        number: Number of the pass in its session.
        microbatches: Number of micro-batches of the batch.
        grad: Whether a backward pass may follow.
        checkpoint: Which micro-batches are recomputed, of which the stage keeps only the inputs; see
            :func:`~strategies.pipeline.schedule.tables.recomputed`.
        seed: The seed from which the seeds of the layers in this pass are derived.
        context: The driver's settings, such as autocast and default dtype.
        at_once: Run the backward passes of all micro-batches in one call of autograd instead of one after another.
        splits: Whether backward passes have two parts.
        gathers: Whether gradients are kept separate from ``.grad`` until they are released.
        ties_changed: Whether values of tied parameters may have changed since the previous pass.
        list_number: Number of the list of layers that the pass runs through; 0 if there is one list or if the pass
            runs through all lists.
    """

    number: int
    microbatches: int
    grad: bool
    checkpoint: str
    seed: int
    context: PassContext
    at_once: bool = False
    splits: bool = False
    gathers: bool = False
    ties_changed: bool = False
    list_number: int = 0

"""How the driver leads a batch through the stages.

In: a batch, or code for each of its micro-batches. Out: the merged output or the loss, as a node of autograd. May
import every room but ``pipe``.
"""

"""How the driver leads a batch through the stages.

``executor`` runs rows of actions on the driver, in two parts or forward only (``gpipe``, evaluation), or interleaved by
``per_microbatch``, whose user code ``suspended`` suspends and resumes. ``settings`` holds the settings of a pipeline.
In: a batch, or code for each of its micro-batches. Out: the merged output or the loss, as a node of autograd. May
import every room but ``pipe`` and ``driver``.
"""

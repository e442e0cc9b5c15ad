"""The user's optimizers over all stages (``optimizers``), and what replicas of a stage share (``replicas``).

In: the user's optimizer objects, on the driver. Out: commands to the stages, averaged gradients, and the optimizer
state of the whole model. May import ``control``, ``transport`` and the rooms below them.
"""

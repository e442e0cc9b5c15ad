"""The user's optimizers over all stages, and the averages of gradients over replicas.

In: optimizer objects of the driver. Out: calls to the stages, and state of the whole model. May import ``control``,
``transport`` and what is below them.
"""

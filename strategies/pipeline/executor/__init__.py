"""The driver's way of a batch: settings, passes over the stages, and their backward parts.

In: a batch. Out: the merged output or the loss, a node of autograd. May import every room but ``pipe``.
"""

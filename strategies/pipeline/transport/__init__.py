"""The data plane: channels that carry nested values of tensors from one process to another; slots that outlive one.

In: a process group and the rank of a peer. Out: values, each with the numbers of its pass and micro-batch. Headers
travel over gloo; tensors do too, or from device to device. ``interface.py`` has what both have in common, and
``planes.py`` chooses. May import ``common``.
"""

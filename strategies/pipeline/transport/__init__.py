"""The data plane: channels that carry nested values of tensors from one process to another.

In: a process group and a peer. Out: values, each tagged with pass and micro-batch. May import ``common``.
"""

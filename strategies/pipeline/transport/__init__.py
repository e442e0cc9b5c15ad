"""The data plane: channels that carry nested values of tensors from one process to another; slots that outlive one.

``channel`` has the two ends of a channel, whose headers travel over gloo; tensors do too, or from device to device
(``device``, by ``nccl`` or ``simulated``). ``interface`` has what both have in common, and ``planes`` chooses. ``ties``
exchanges tied parameters, ``storages`` sends a stage's values at the start, ``slots`` holds snapshots. In: a process
group and the rank of a peer. Out: values, each with the numbers of its pass and micro-batch. May import ``common``.
"""

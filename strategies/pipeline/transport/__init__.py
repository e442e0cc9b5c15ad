"""The data plane: channels that carry nested values of tensors from one process to another; slots that outlive one.

``channel`` has the two ends of a channel, whose headers travel over gloo; tensors do too, or from device to device
(``device``, by ``nccl`` or ``simulated``). ``interface`` has what both have in common, and ``planes`` chooses. ``ties``
exchanges tied parameters, ``storages`` sends a stage's values at the start, ``slots`` holds snapshots, ``journal``
notes what is exchanged in a verified step. ``rpc`` carries the values of ``Pipe`` between RPC workers of the user. In:
a process group and the rank of a peer. Out: values, each with the numbers of its pass and micro-batch. May import
``common``.

Channels between the same two processes differ by their tag: 4 and 6 gradients and values of tied parameters, 8 values
at start-up, 10 commands, 16 + 2e activations into chunk e (e = 0: the driver's inputs). What follows a header has the
next tag. On the simulated planes, payloads have the tag of their channel plus 1000.
"""

"""The data plane: links that carry nested values of tensors between processes; slots that outlive a process.

``link`` has the link of two processes and the two ends of its channels, whose headers travel over gloo; tensors do too,
or from device to device (``device``, by ``nccl`` or ``simulated``). ``interface`` has what both have in common, and
``planes`` chooses. ``ties`` exchanges tied parameters, ``storages`` sends a stage's values at the start, ``slots``
holds snapshots, ``journal`` notes what is exchanged in a verified step. ``rpc`` carries the values of ``Pipe`` between
RPC workers of the user. In: a process group and the rank of a peer. Out: values, each with the numbers of its pass and
micro-batch. May import ``common``.
"""

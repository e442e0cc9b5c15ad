"""Processes: how they are started, find each other, are watched, and end.

``workers`` starts the workers of a pipeline, by ``fork_server`` on Linux; ``ranks`` uses the processes that torchrun or
SLURM has started, in which ``rank_supervisor`` may replace a worker. ``rendezvous``, ``session`` and ``private_rpc``
connect processes, ``rounds`` lets several go back to an earlier state together, ``process_ends`` and ``rank_monitor``
watch and end them, ``limits`` says how much memory they may take, and ``allocator`` how they keep it. In: how many
processes, on which hosts. Out: sessions (RPC and gloo groups over a rendezvous) and processes that end with the run,
however it ends. May import ``common``.
"""

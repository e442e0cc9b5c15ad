"""``Pipe``: an ``nn.Sequential`` as a pipeline in a hand-written training loop, in one process or over RPC workers.

In: an ``nn.Sequential``, whose layers ``with_device`` groups into partitions. ``local_engine`` runs partitions of one
process as one autograd graph; ``rpc_partitions`` makes a pipeline of partitions in several processes, whose optimizers
are ``followed``. May import every other room of the engine.
"""

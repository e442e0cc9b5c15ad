"""``Pipe``: an ``nn.Sequential`` as a pipeline in a hand-written training loop, in one process or over RPC workers.

In: an ``nn.Sequential``, whose layers ``with_device`` groups into partitions. ``local_engine`` runs partitions of one
process as one autograd graph; ``remote_engine`` leads partitions in several processes, between which ``routing`` sends
values. May import every other room of the engine.
"""

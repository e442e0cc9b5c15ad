"""The launchers of the Trainer: they start ranks and replicas, and connect them.

``script_launcher`` starts the other ranks of this host, and ``rank_launcher`` uses the ranks of torchrun or SLURM.
``replicas`` makes each pipeline one rank for Lightning, and ``loopback`` connects ranks on one host. ``environment``
checks the launcher that started the ranks, ``phases`` notes what a rank does, and ``requeue`` saves after a batch
when SLURM announces the end of a job. In: calls of the Trainer's launcher and cluster environment. Out: processes and
process groups of the room ``strategies.launch``. May import ``compat`` and ``hooks`` of the room above, and what the
room above may import.
"""

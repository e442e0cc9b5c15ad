"""Launchers that a Trainer delegates to: starting ranks and replicas, and connecting them.

``script_launcher`` starts the other ranks of this host and ``rank_launcher`` uses those of torchrun or SLURM;
``replicas`` makes a rank of each pipeline, ``loopback`` connects ranks on one host, ``environment`` checks what has
started the ranks, and ``phases`` records what a rank does. In: calls of the Trainer's launcher and cluster environment.
Out: processes and process groups of the room ``strategies.launch``. May import ``compat`` of the room above, and what
that room may import.
"""

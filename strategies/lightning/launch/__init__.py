"""Launchers that a Trainer delegates to: starting ranks and replicas, connecting them, restarting after a lost worker.

``script_launcher`` starts the other ranks of this host and ``rank_launcher`` uses those of torchrun or SLURM;
``replicas`` makes a rank of each pipeline, ``loopback`` connects ranks on one host, ``phases`` records what a rank
does, and ``restarts`` runs ``fit`` again. In: calls of the Trainer's launcher and cluster environment. Out: processes
and process groups of the room ``strategies.launch``. May import ``compat`` and ``checks`` of the room above, and what
that room may import.
"""

"""Launchers that a Trainer delegates to: starting ranks and replicas, connecting them, restarting after a lost worker.

In: calls of the Trainer's launcher and cluster environment. Out: processes and process groups of the room
``strategies.launch``. May import ``compat`` and ``checks`` of the room above, and what that room may import.
"""

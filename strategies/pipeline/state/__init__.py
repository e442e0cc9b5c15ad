"""The state of stages: on the way to workers, on them, and as the driver sees it.

``stage_state`` is what a worker begins with, and ``carriers`` bring it there; ``held`` captures and places parts of it
on the worker, ``returning`` brings it back. In: layers that have been sent to workers. Out: stand-ins for their tensors
(``stand_ins``, ``remote_tensor``), the ``state_dict`` of all stages (``state_dict``), changes of layers that workers
take over (``mirror``) or have made (``objects``), and operations that the stages carry out (``remote_operations``);
copies of the state in memory, to go back to (``snapshots``), and tensors of a checkpoint that stay on the workers
(``shelved``). May import ``control``, ``optim``, ``strategies.optim`` and the rooms below them.
"""

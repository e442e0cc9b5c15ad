"""The worker's process: it hosts one stage and runs the commands of the driver.

In: the state of a stage, from the driver or from a snapshot, and commands. Out: answers,
and values to its neighbours. ``process`` sets the process up, ``serve`` does so for a rank that torchrun or SLURM has
started, ``setup`` is what the driver says about the stage, ``hosted`` the stage with its commands. May import every
room of the engine but those of the driver (``partition``, ``recovery``, ``executor``, ``pipe``).
"""

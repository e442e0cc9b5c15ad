"""The worker's process: it hosts one stage and runs the commands of the driver.

In: the payload of the driver (layers, its part of the optimizers), which ``payload`` packs, and commands. Out: answers,
and values to its neighbours. ``process`` sets the process up, ``serve`` does so for a rank that torchrun or SLURM has
started, ``hosted`` is the stage with its commands, ``wiring`` connects it to its neighbours, ``taking_over`` is its
part of snapshots. May import every room of the engine but those of the driver (``partition``, ``executor``, ``pipe``).
"""

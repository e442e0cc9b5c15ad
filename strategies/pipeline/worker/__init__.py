"""The worker's process: it hosts one stage, its part of the optimizers, and runs the driver's commands.

May import every room of the engine that is not the driver's (``partition``, ``executor``, ``pipe``).
"""

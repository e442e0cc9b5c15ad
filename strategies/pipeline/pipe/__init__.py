"""``Pipe``: an ``nn.Sequential`` as a pipeline in a hand-written training loop, in one process or over RPC workers.

May import every other room of the engine.
"""

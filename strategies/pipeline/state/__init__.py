"""The values that live on workers, seen from the driver: stand-ins, their ``state_dict``, operations on them.

May import ``control``, ``optim`` and what is below them.
"""

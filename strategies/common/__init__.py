"""Helpers that every other room may use: nested structures, autograd nodes, errors that cross processes, names,
messages.

Nothing here knows pipelines, shards or Lightning. ``torch_compat`` holds every private name of torch. Imports no other
room.
"""

"""Helpers that every other room may use: nested structures, autograd nodes, errors that cross processes, names.

``torch_compat`` and ``transformers_compat`` hold every private name of torch and of ``transformers``; ``trees`` finds
tensors, ``autograd`` has its own nodes, ``initialisation`` gives initial values, ``random_seeds`` seeds layers and
keeps the states of generators, ``live_bytes`` counts memory, ``patching`` changes objects for a while. ``activity``
says what a process does, ``waiting`` how it waits for another, ``errors`` that another has ended; ``stage_layers`` and
``names`` describe things in messages. In and out: values. Nothing here knows pipelines, shards or Lightning. Imports
no other room.
"""

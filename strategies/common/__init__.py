"""What every other room may use: names and messages, nested structures of tensors, errors that cross processes.

Nothing here knows of pipelines, of shards or of Lightning. Imports no other room.
"""

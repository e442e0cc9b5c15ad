"""One checkpoint store: full files and sharded directories, written atomically, in the foreground or the background.

In: state dicts with the names of one process. Out: files and directories, or validated state dicts. May import the
engine (``pipeline``, ``sharding``) and what is below it.
"""

"""Checkpoints: a file or a sharded directory, written atomically, in the foreground or the background.

``save_and_load`` writes and reads the two forms, ``atomic`` the files and directories beneath them, ``streaming`` files
whose tensors are fetched one after another; ``background`` writes on a thread. ``pipeline_checkpoint`` (its stages),
``ranks`` (ZeRO) and ``divided_rows`` (ZeRO stage 3) gather what processes hold and write it together; ``references``
lets each process read the tensors of its own layers; ``validate`` checks a state dict before it is loaded. In: state
dicts, a running pipeline or divided optimizers. Out: files and directories, state dicts with the names of one process.
Strategies call this, and users the command ``consolidate``, which makes one file of a sharded checkpoint. It may import
the engine (``pipeline``, ``sharding``) and what is below, and never Lightning.
"""

"""ZeRO's engine: optimizer state divided over data-parallel ranks. Imports torch, never Lightning.

In the order of reading: :mod:`~strategies.sharding.partition` and ``ownership`` (who owns what), ``bucket`` (what
travels together), ``reducer`` (gradients to their owners), ``optimizers`` (steps and new values), ``states``
(checkpoints). Which optimizers can be divided at all says :mod:`strategies.optimizer_trial`.
"""

"""What only Lightning needs: the strategies' shared parts, from launching replicas to precision and gradient hooks.

In: calls of the Trainer, its plug-ins and callbacks. Out: calls of the engine. Private names of Lightning stand in
``compat`` only. May import every room but the strategies themselves.
"""

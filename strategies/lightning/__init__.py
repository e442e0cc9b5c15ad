"""What only Lightning needs: the parts that the strategies share, from launching replicas to hooks into its objects.

In: calls of the Trainer, its plug-ins and callbacks. Out: calls of the engine. ``compat`` alone uses private names of
Lightning, ``hooks`` replaces methods of its objects, ``checks`` and ``arguments`` refuse wrong settings. May import
every room but the strategies themselves.
"""

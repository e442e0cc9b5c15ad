"""Schedules as data: tables of actions per process, and what each process does in a pass.

``tables`` has the named schedules, ``custom`` those of users, ``planned`` what a search has chosen; ``deadlocks``
proves that a table can run; ``operations`` are what a row consists of, ``program`` adds the code of the driver, and
``posting`` sends and receives. In: numbers of processes and micro-batches, files with tables. Out: rows of actions and
of operations. Pure functions; imports no other room. What predicts times and searches is in ``strategies.planning``.
"""

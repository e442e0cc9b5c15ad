"""Schedules as data: tables of actions per process, simulators that check and time them, the search for a plan.

``tables`` has the named schedules, ``custom`` those of users, ``planned`` what a search has chosen; ``running_order``
proves that a table can run, ``timetable`` adds the code of the driver, and ``operations`` and ``posting`` sends and
receives. ``simulator`` computes times, ``devices`` checks the order on devices, ``search`` finds a plan, ``measured``
and ``imbalance`` say what recorded steps show, ``picture`` draws. In: numbers of processes and micro-batches, measured
costs, files with tables, records of a step. Out: rows of actions, the order of sends and receives, predicted and
measured times, memory, a plan, pictures. Pure functions; imports no other room.
"""

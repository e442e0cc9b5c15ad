"""Schedules as data: tables of actions per process, the simulator that checks and times them, the search for a plan.

In: numbers of processes and micro-batches, measured costs, files with tables. Out: rows of actions, predicted times and
memory, a plan. Pure functions; imports no other room.
"""

"""Schedules as data: tables of actions per process, simulators that check and time them, the search for a plan.

In: numbers of processes and micro-batches, measured costs, files with tables, records of a step. Out: rows of actions,
the order of sends and receives, predicted and measured times, memory, a plan, pictures. Pure functions; imports no
other room.
"""

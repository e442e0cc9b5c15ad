"""Schedules as data: tables of actions per process, and the simulator that checks and times them.

In: numbers of processes and micro-batches, files with tables. Out: rows of actions. Pure functions; imports no other room.
"""

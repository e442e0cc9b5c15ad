"""Schedules as data: tables of actions per stage, and the simulator that checks and times them.

In: numbers of stages and micro-batches. Out: rows of actions. Pure functions; imports no other room.
"""

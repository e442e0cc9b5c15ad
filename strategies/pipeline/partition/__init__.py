"""Splitting an ``nn.Sequential`` into stages: what each layer costs, and how many layers each stage gets.

In: an ``nn.Sequential`` and a sample. Out: seconds or bytes per layer (``profiling``), a balance (``balance``), and the
stages (``sequential``); ``probe`` finds the input of a module inside a model. May import ``stage``, ``microbatch`` and
what is below them.
"""

"""Splitting layers or blocks into stages: what each of them costs, and how many of them each stage gets.

In: layers or blocks, and a sample. Out: seconds or bytes per layer (``profiling``), also of the rest of the model
(``model_costs``); a balance (``balance``), and the stages (``sequential``). ``memory`` refuses stages that cannot fit;
``probe`` finds the input of a module inside a model; ``blocks`` pipelines models that loop over their blocks. May
import ``stage`` and what is below it, ``launch`` and ``strategies.optim``.
"""

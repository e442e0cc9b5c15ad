"""The driver's end of the control plane: commands to stages, their failures, and stages that hang.

In: calls of commands by the rooms above. Out: their results, or the first failure of any process. ``commands`` declares
the commands of a stage. ``client`` sends them (``send``: no result, over the link of the stage; ``ask``: with a result,
by RPC; ``beside``: out of band, while commands run) and collects failures. ``hanging_stages`` finds stages that hang,
``lost_workers`` finds out how a process ended whose pending call failed, ``clocks`` compares the clocks of the stages
with the driver's, and ``batch_recording`` records the actions of all processes in one batch. ``operations`` describes
operations on the tensors of a stage. ``parts`` and ``shelf`` describe the parts of its state that a stage sets aside
for the driver. May import ``common``, ``commands``, ``launch``, ``strategies.optim`` and the rooms from ``stage`` down.
"""

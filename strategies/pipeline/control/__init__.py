"""The driver's end of the control plane: commands to stages, their failures, and stages that hang.

In come calls of commands by the rooms above; out go their results, or the first failure of any process. ``commands``
declares what a stage can be told, ``client`` sends it and collects what goes wrong, ``watch`` finds stages that hang,
``clocks`` compares their clocks with the driver's.

May import ``common``, ``commands``, ``launch`` and the rooms from ``stage`` down.
"""

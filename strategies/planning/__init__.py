"""Tools that predict how a pipeline would run and compare recorded steps with it. No run needs them to train.

Plain functions of tables, costs and records: ``simulator`` computes times and memory of a table, ``search`` finds the
fastest plan, ``action_costs`` measures what actions cost, ``plan_rows`` predicts ways to run a model, ``measured`` and
``imbalance`` say what recorded steps show, ``picture`` draws timetables. For a ``LightningModule``: ``automatic``
chooses for ``schedule="auto"``, ``plan`` makes the table of ``trainer.plan``, ``rebalancing`` decides for
``rebalance="auto"`` when layers move.

In: a model and an example of its input, or records of steps. Out: predicted times and memory, a schedule with its
balance, pictures. Imports the engine and ``lightning``, neither of which imports this room. The strategy, the monitor
and the report import its modules only when they are used.
"""

"""How a model is divided over processes: before a run, for ``schedule="auto"``, and in mid-run.

In: a model, an example of its input or a batch, and the strategy's settings. Out: the pipelined part and its balance
(``partitioning``), the schedule that ``"auto"`` chooses (``automatic``), the table of ``trainer.plan`` (``plan``), and
when layers move to other stages (``rebalancing``). May import the modules of the room above, and what that room may
import.
"""

"""Replaces lost workers with new workers, without the code of the driver noticing.

In: the stages on workers, the connections to them, and a function that starts new workers. Out: channels that outlive
the workers, and an entry for each repair. ``log`` keeps what the driver has exchanged with the workers since the last
snapshot, ``logged_transport`` has the driver's channels, and ``repairs`` is the thread that replaces workers.
``together`` agrees on repairs with the drivers of other pipelines, ``verification`` finds the stage that computes a
step differently the second time, and ``recovery`` takes snapshots and connects these modules. May import
``common``, ``launch`` and the rooms from ``state`` down.
"""

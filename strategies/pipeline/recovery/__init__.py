"""New workers in place of lost ones, of which the code of the driver need not know.

In: the stages on workers, the connections to them, and what starts new workers. Out: channels that outlive the workers,
and an entry for each repair. ``log`` keeps what the driver has exchanged with the workers since the last snapshot,
``links`` are its channels, ``repairs`` is the thread that replaces workers, ``together`` agrees with the drivers of
other replicas, ``recovery`` takes snapshots and joins all of it. May import ``common``, ``launch`` and the rooms from
``state`` down.
"""

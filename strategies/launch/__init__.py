"""Processes: how they are started, find each other, are watched, and end.

In: how many processes, on which hosts. Out: sessions (RPC and gloo groups over a rendezvous) and processes that end
with the run, however it ends; ``limits`` says how much memory they may take. May import ``common``.
"""

"""Simulation: the live Scheduler on a virtual clock, and the two proofs that live and simulated are one program.

Owns: the event heap, a replica's turns as the engine's step loop makes them, models of the machine below, reports.
Must not know: torch, sockets, wall time. It decides nothing that core decides; everything follows from its arguments.
Start reading at `replica.py`, then `replay.py` and `agreement.py`.
"""

"""A replica as several processes: who they are, how they talk, what happens when one fails.

Rank 0 is the engine process: it plans, tells the others each plan, and alone speaks with gateways. Every other rank
computes the same plans over its own share of the model and decides nothing.
Owns ranks, their groups and what they say to each other. Must not know requests' lives or how a step is composed.
Start reading at layout.py, then comm.py, group.py (rank 0's side) and rank.py (the others').
"""

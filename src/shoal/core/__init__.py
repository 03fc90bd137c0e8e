"""One replica's decisions: what each step computes, and for whom.

Owns: requests, the waiting line, composition, blocks, the prefix cache. Standard library only.
Must not know: clocks, chance, sockets, text, tensors. Start reading at `plan.py`, then `scheduler.py`.
"""

"""What a process tells the people who run it: log lines, Prometheus metrics, the journal of a scheduler.

Owns: formats and names. Must not know: what the numbers mean to a decision; nothing here is read back by one.
Start reading at `metrics.py`, then `journal.py`.
"""

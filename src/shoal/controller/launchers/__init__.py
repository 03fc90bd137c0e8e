"""Who starts the processes: one module per place. Owns: starting, watching, restarting, stopping them in order.

Must not know: what a process does with requests. Start reading at `local.py`.
"""

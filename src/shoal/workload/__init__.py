"""Loads as plain data, and the arithmetic over their latencies: shared by the load driver and the simulator.

Owns: arrival processes, length mixes, traces (rows of arrival, lengths, class and tenant), percentiles, SLO attainment.
Must not know: how a request is sent, what a scheduler is, what time it is. Randomness comes seeded, as an argument.
Start reading at `trace.py`.
"""

"""Capacity planning: what a model takes, which layouts of ranks hold it, how fast each is, and what to buy.

Owns: memory arithmetic (engines size their KV pool with it), the catalogue of models, GPUs and links (data/), layouts,
a roofline model of a step, the recommendation with its reasons, and the search for the smallest fleet.
Must not know: torch, how an engine is built, where a number is shown. Everything follows from its arguments; the
catalogue alone is read from files of this package.
Start reading at `model.py`, `weights.py` and `kv.py`, then `memory.py`, `layouts.py`, `cost.py`, `choose.py`.

Sizes are bytes. Where they are shown, GB is 10^9 bytes and GiB is 2^30.
"""

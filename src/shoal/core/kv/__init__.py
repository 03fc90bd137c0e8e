"""One replica's KV blocks: which are free, which are held, what they hold, and which cached one to give up first.

Owns block ids, reference counts, prefix keys and the eviction order. Must not know tensors, requests' states or time.
Start reading at `blocks.py`; `hashing.py` is shared with whoever makes prefix keys (gateway, router).
"""

"""Model families: config.json → settings, weights → tensors, tokens → hidden states.

Owns the architectures (registry.py), their weights (load.py) and attention over block tables (attention.py).
Must not know requests, plans or sampling. Start with registry.py, then llama.py.
"""

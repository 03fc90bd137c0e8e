"""The gateway: HTTP in, tokens out to the replicas, text back. The only place that knows text.

Owns: the OpenAI-compatible API, keys, limits, templates and tokenising (`text/`), the connections to the replicas,
and each client request from its first byte to its one line in the log.

Must not know: blocks, steps, tensors; which request a replica advances next.
Start reading at `routes.py` (what can be asked), then `dispatch.py` (what becomes of it). `main.py` builds the parts.
"""

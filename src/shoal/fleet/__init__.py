"""Decisions across replicas: which one a request goes to, and what becomes of it when that one fails.

Owns: what a replica looks like from outside (`view.py`), the choice of one (`route.py`), a client request's life over
its attempts (`stream.py`), how long silence means life (`health.py`), and when a process that died starts again
(`lifecycle.py`). Pure: values in, values out; no clock, no chance, no sockets, standard library only.

Must not know: the wire's messages, HTTP, text. Start reading at `route.py`, then `stream.py`.
"""

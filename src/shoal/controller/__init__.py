"""The control plane: who is there, who can take work, and the status page. Also the launchers that start processes.

Owns: the registry with its leases, the lists pushed to gateways, supervision on one machine.
Must not know: requests, tokens, text. Nothing here is on a request's path: without it, traffic flows on.
Start reading at `registry.py`, then `launchers/local.py`.
"""

"""What processes say to each other, and how it travels: message types, codec, handshake, connections.

Owns: the protocol version, framing, authentication between processes, bounded outboxes, Unix socket files.
Must not know: what a message makes a process do. Start reading at `messages.py`, then `connection.py` and
`listener.py`; `control.py` is what every process keeps up with the controller.
"""

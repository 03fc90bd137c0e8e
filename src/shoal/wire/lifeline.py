"""A process ends when its supervisor is gone, however that went.

The supervisor holds the write end of a pipe and never writes; the child inherits the read end. The kernel closes the
write end even when the supervisor is killed, and the end of file is the child's order to stop.
"""

from __future__ import annotations

import os
import signal
import threading
import time

VARIABLE = "SHOAL_LIFELINE_FD"  # number of the inherited descriptor; unset where nobody supervises
GRACE_S = 10.0


def watch() -> None:
    """Called once by each main. From the end of file on: SIGTERM to this process, and its end GRACE_S later."""
    number = os.environ.pop(VARIABLE, "")
    if number:
        threading.Thread(target=_wait, args=(int(number),), name="lifeline", daemon=True).start()


def _wait(fd: int) -> None:
    while os.read(fd, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os._exit(1)

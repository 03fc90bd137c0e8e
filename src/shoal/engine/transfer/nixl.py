"""By NIXL (extra `nixl`): RDMA where there is a network for it, else UCX's own ways through memory and TCP.

The agent's own progress thread would keep a core busy for as long as the process lives (measured with 1.5.1), so there
is none: a thread of ours looks after the agent every half millisecond, and only while memory is lent.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import threading
import time
from collections import Counter, deque
from typing import Any

import msgspec

from shoal.engine.transfer.transport import POLL_S, Memory, TransportError

_BUILDS = ("nixl_cu13", "nixl_cu12")  # either works without a GPU too
_BACKEND = "UCX"
_LOOK_S = 0.0005

log = logging.getLogger("shoal.engine")


class Unavailable(Exception):
    """NIXL is not installed, or does not work here."""


class _Door(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    agent: bytes  # its connection and its keys to the memory, as NIXL packs them
    address: int
    num_bytes: int


class Nixl:
    """`name`: of the agent; each process needs another one. It takes half a second to make. Raises Unavailable."""

    name = "nixl"

    def __init__(self, name: str) -> None:
        os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
        self._agent = _agent(name)
        self._lock = threading.Lock()
        self._lent: dict[int, tuple[Memory, Any]] = {}  # by address, with NIXL's own list
        self._peers: Counter[str] = Counter()  # how many readers of each
        self._given_up: list[NixlReader] = []  # closed, but a read of theirs may still land
        self._lending = threading.Event()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def register(self, memory: Memory) -> bytes:
        with self._lock:
            try:
                listed = self._listed(memory)
                agent = self._agent.get_partial_agent_metadata(listed, True, [_BACKEND])
            except Exception as e:
                raise TransportError(f"NIXL takes no such memory: {e}") from None
            self._lent[memory.address] = memory, listed
            if self._thread is None:
                self._thread = threading.Thread(target=self._look_after, name="nixl", daemon=True)
                self._thread.start()
            self._lending.set()
        return msgspec.msgpack.encode(_Door(agent, memory.address, memory.num_bytes))

    def withdraw(self, memory: Memory) -> None:
        with self._lock:
            found = self._lent.pop(memory.address, None)
            if found is not None:
                with contextlib.suppress(Exception):  # the lease is over in any case
                    self._agent.deregister_memory(found[1])
            if not self._lent:
                self._lending.clear()

    def open(self, door: bytes, target: Memory, limit_s: float) -> NixlReader:
        """NIXL connects with the first read: that one shows whether there is a way."""
        self._sweep()
        try:
            where = msgspec.msgpack.decode(door, type=_Door)
            with self._lock:
                peer = self._agent.add_remote_agent(where.agent)
                peer = peer.decode() if isinstance(peer, bytes) else peer
                listed = self._listed(target)
                self._peers[peer] += 1
        except Exception as e:
            raise TransportError(f"no way by NIXL: {e}") from None
        return NixlReader(self, self._agent, peer, where.address, listed, target)

    def close(self) -> None:
        self._closing.set()
        self._lending.set()
        if self._thread is not None:
            self._thread.join(1.0)
        with self._lock:
            for _, listed in self._lent.values():
                self._agent.deregister_memory(listed)
            self._lent.clear()

    def give_up(self, reader: NixlReader) -> None:
        """It ends, and its memory with it, when its reads have."""
        with self._lock:
            self._given_up.append(reader)

    def _sweep(self) -> None:
        with self._lock:
            given_up, self._given_up = self._given_up, []
        for reader in given_up:
            reader.close()

    def leave(self, peer: str) -> None:
        """One reader less."""
        with self._lock:
            self._peers[peer] -= 1
            if not self._peers[peer]:
                del self._peers[peer]
                with contextlib.suppress(Exception):  # it may be gone already
                    self._agent.remove_remote_agent(peer)

    def _listed(self, memory: Memory) -> Any:
        return self._agent.register_memory([(memory.address, memory.num_bytes, 0, "")], "DRAM", [_BACKEND])

    def _look_after(self) -> None:
        while self._lending.wait() and not self._closing.wait(_LOOK_S):
            self._agent.get_new_notifs()


class NixlReader:
    def __init__(self, nixl: Nixl, agent: Any, peer: str, address: int, listed: Any, target: Memory) -> None:
        self._nixl = nixl
        self._agent = agent
        self._peer = peer
        self._address = address
        self._listed = listed
        self._target = target
        self._view = target.view  # keeps the memory mapped, whatever becomes of the target
        self._asked: deque[Any] = deque()

    def read(self, offset: int, num_bytes: int) -> None:
        try:
            here = self._agent.get_xfer_descs([(self._target.address + offset, num_bytes, 0)], "DRAM")
            there = self._agent.get_xfer_descs([(self._address + offset, num_bytes, 0)], "DRAM")
            asked = self._agent.initialize_xfer("READ", here, there, self._peer)
            self._asked.append(asked)
            self._agent.transfer(asked)
        except Exception as e:
            raise TransportError(f"NIXL: {e}") from None

    def poll(self) -> bool:
        due_s = time.monotonic() + POLL_S
        try:
            while (state := self._agent.check_xfer_state(self._asked[0])) == "PROC":
                if time.monotonic() >= due_s:
                    return False
                time.sleep(_LOOK_S)
            if state != "DONE":
                raise TransportError("NIXL gave up the read")
            self._agent.release_xfer_handle(self._asked.popleft())
        except TransportError:
            raise
        except Exception as e:
            raise TransportError(f"NIXL: {e}") from None
        return True

    def close(self) -> bool:
        """A read that is under way cannot be called back: NIXL cancels, and does not say when it has. Its memory stays
        until the owner has answered, or is known to be gone."""
        while self._asked:
            with contextlib.suppress(Exception):  # the owner is gone
                if self._agent.check_xfer_state(self._asked[0]) == "PROC":
                    self._nixl.give_up(self)
                    return False
                self._agent.release_xfer_handle(self._asked[0])
            self._asked.popleft()
        self._nixl.leave(self._peer)
        self._agent.deregister_memory(self._listed)
        return True


def _agent(name: str) -> Any:
    for build in _BUILDS:
        try:
            api = importlib.import_module(f"{build}._api")
        except ImportError as e:
            reason = e
            continue
        try:
            settings = api.nixl_agent_config(
                enable_prog_thread=False,
                sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
                backends=[_BACKEND],
            )
            return api.nixl_agent(name, settings)
        except Exception as e:
            raise Unavailable(f"{build}: {e}") from None
    raise Unavailable(f"the extra `nixl` is not installed: {reason}")

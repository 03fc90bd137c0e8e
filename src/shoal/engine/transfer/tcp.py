"""Between hosts: a socket of its own for the bytes, beside the connection that carries the messages.

    owner: nonce (16)     reader: number of the memory (8), proof (32)     then any number of times
    reader: offset (8), length (8)     owner: those bytes

The proof is an HMAC of the nonce, with the key that the door names: a new one for each memory, told over a connection
that was authenticated. Each read is one call on either side that holds no lock of Python's; a thread per reader sends,
and ends when the memory is withdrawn.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import secrets
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable

import msgspec

from shoal.engine.transfer.transport import POLL_S, Memory, TransportError
from shoal.wire import address as addresses

HELLO_S = 2.0  # what a stranger gets to prove itself
MAX_STRANGERS = 16  # at one time
_NONCE_BYTES = 16
_HELLO = struct.Struct("!Q32s")
_RANGE = struct.Struct("!QQ")

log = logging.getLogger("shoal.engine")


class _Door(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    address: str  # with a number as host: no name is looked up on the threads that read
    number: int
    key: bytes


class _Lent:
    """One memory, and who reads it now."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.key = secrets.token_bytes(32)
        self.sockets: set[socket.socket] = set()


class Tcp:
    """Listens with the first memory that is registered. `host`: of an address at which other engines reach this one."""

    name = "tcp"

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self._where = addresses.TcpAddress(host, port)
        self._lock = threading.Lock()
        self._lent: dict[int, _Lent] = {}
        self._num_lent = 0
        self._strangers: set[socket.socket] = set()
        self._listener: socket.socket | None = None
        self._threads: set[threading.Thread] = set()

    def register(self, memory: Memory) -> bytes:
        listener = self._listen()
        lent = _Lent(memory)
        with self._lock:
            self._num_lent += 1
            number = self._num_lent
            self._lent[number] = lent
        address = addresses.TcpAddress(*listener.getsockname()[:2])
        return msgspec.msgpack.encode(_Door(str(address), number, lent.key))

    def withdraw(self, memory: Memory) -> None:
        with self._lock:
            numbers = [number for number, lent in self._lent.items() if lent.memory is memory]
            cut = [sock for number in numbers for sock in self._lent.pop(number).sockets]
            for sock in cut:
                _shut(sock)

    def open(self, door: bytes, target: Memory, limit_s: float) -> TcpReader:
        try:
            where = msgspec.msgpack.decode(door, type=_Door)
            address = self._leads_to(addresses.parse(where.address))
            sock = socket.create_connection((address.host, address.port), limit_s)
        except (msgspec.DecodeError, ValueError, OSError) as e:
            raise TransportError(f"no way by tcp: {e}") from None
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            proof = hmac.digest(where.key, _exactly(sock, _NONCE_BYTES, limit_s), "sha256")
            sock.sendall(_HELLO.pack(where.number, proof))
            return TcpReader(sock, target)
        except (OSError, struct.error) as e:
            sock.close()
            raise TransportError(f"no way by tcp: {e}") from None

    def close(self) -> None:
        """Every thread of this has ended, or is about to."""
        with self._lock:
            listener, self._listener = self._listener, None
            cut = [sock for lent in self._lent.values() for sock in lent.sockets]
            self._lent.clear()
            for sock in (*cut, *self._strangers):
                _shut(sock)
            threads = list(self._threads)
        if listener is not None:
            _shut(listener)  # wakes the thread that accepts
        for thread in threads:
            thread.join(HELLO_S)
        if listener is not None:
            listener.close()

    def _leads_to(self, address: addresses.UnixAddress | addresses.TcpAddress) -> addresses.TcpAddress:
        """An engine that others reach on its own machine only goes nowhere else either."""
        if not isinstance(address, addresses.TcpAddress) or not addresses.is_number(address.host):
            raise ValueError(f"{address} is no number and port")
        if addresses.other_hosts_reach(address) and not addresses.other_hosts_reach(self._where):
            raise ValueError(f"{address} is not on this machine, and {self._where} is")
        return address

    # -- the owner's side ----------------------------------------------------------------------------------------------

    def _listen(self) -> socket.socket:
        with self._lock:
            if self._listener is not None:
                return self._listener
            try:
                self._listener = addresses.bind(self._where)
                self._listener.listen(MAX_STRANGERS)
            except (OSError, ValueError) as e:
                raise TransportError(str(e)) from None
            self._begin("tcp-accepts", self._accept, self._listener)
            return self._listener

    def _begin(self, name: str, work: Callable[[socket.socket], None], sock: socket.socket) -> None:
        """With the lock held."""
        thread = threading.Thread(target=self._run, args=(work, sock), name=name, daemon=True)
        self._threads.add(thread)
        thread.start()

    def _run(self, work: Callable[[socket.socket], None], sock: socket.socket) -> None:
        try:
            work(sock)
        finally:
            with self._lock:
                self._threads.discard(threading.current_thread())

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            with self._lock:
                if self._listener is not listener:
                    sock.close()
                    return
                if len(self._strangers) >= MAX_STRANGERS:
                    sock.close()
                    continue
                self._strangers.add(sock)
                self._begin("tcp-sends", self._serve, sock)

    def _serve(self, sock: socket.socket) -> None:
        lent: _Lent | None = None
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            lent = self._let_in(sock)
            if lent is not None:
                _send(sock, lent.memory)
        except OSError:
            pass  # the reader is gone, or was cut off
        finally:
            with self._lock:
                self._strangers.discard(sock)
                if lent is not None:
                    lent.sockets.discard(sock)
                sock.close()  # with the lock: nobody shuts a number that means another socket by then

    def _let_in(self, sock: socket.socket) -> _Lent | None:
        nonce = secrets.token_bytes(_NONCE_BYTES)
        sock.settimeout(HELLO_S)
        sock.sendall(nonce)
        number, proof = _HELLO.unpack(_exactly(sock, _HELLO.size, HELLO_S))
        sock.settimeout(None)
        with self._lock:
            self._strangers.discard(sock)
            lent = self._lent.get(number)
            if lent is None or not hmac.compare_digest(proof, hmac.digest(lent.key, nonce, "sha256")):
                log.warning("tcp.refused", {"known": lent is not None})
                return None
            lent.sockets.add(sock)
            return lent


def _send(sock: socket.socket, memory: Memory) -> None:
    """Waits without a limit, for the next question and for a reader that reads: until the memory is withdrawn."""
    view = memory.view
    while len(asked := sock.recv(_RANGE.size, socket.MSG_WAITALL)) == _RANGE.size:
        offset, num_bytes = _RANGE.unpack(asked)
        if not 0 < num_bytes <= memory.num_bytes - offset:
            return
        sock.sendall(view[offset : offset + num_bytes])


class TcpReader:
    """Bytes land where they belong, without a copy in between; only while `poll` is called."""

    def __init__(self, sock: socket.socket, target: Memory) -> None:
        sock.settimeout(None)  # MSG_WAITALL is for sockets that block; the system ends each wait
        wait = struct.pack("@ll", 0, int(POLL_S * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, wait)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", int(HELLO_S), 0))
        self._sock = sock
        self._target = target
        self._asked: deque[tuple[int, int]] = deque()
        self._num_got = 0  # of the oldest

    def read(self, offset: int, num_bytes: int) -> None:
        self._asked.append((offset, num_bytes))
        try:
            self._sock.sendall(_RANGE.pack(offset, num_bytes))
        except OSError as e:
            raise TransportError(f"the owner cannot be asked: {e}") from None

    def poll(self) -> bool:
        offset, num_bytes = self._asked[0]
        start, end = offset + self._num_got, offset + num_bytes
        try:
            num_got = self._sock.recv_into(self._target.view[start:end], end - start, socket.MSG_WAITALL)
        except BlockingIOError:
            return False
        except OSError as e:
            raise TransportError(f"the owner is gone: {e}") from None
        if num_got == 0:
            raise TransportError("the owner closed the connection")
        self._num_got += num_got
        if self._num_got < num_bytes:
            return False
        self._asked.popleft()
        self._num_got = 0
        return True

    def close(self) -> bool:
        self._sock.close()
        return True


def _exactly(sock: socket.socket, num_bytes: int, limit_s: float) -> bytes:
    """Raises OSError where they do not come within the limit."""
    due_s = time.monotonic() + limit_s
    got = b""
    while len(got) < num_bytes:
        sock.settimeout(max(0.001, due_s - time.monotonic()))
        more = sock.recv(num_bytes - len(got))
        if not more:
            raise ConnectionError("closed in the middle of the greeting")
        got += more
    return got


def _shut(sock: socket.socket) -> None:
    """Wakes whoever waits on it, who then closes it."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)

"""Who is there. Pure: registrations and times go in, lists come out; leases expire by the times that are passed.

An entry belongs to a role and a name. A new incarnation takes the name over at once; messages that still come from the
old one, or over an older session of the same one, are refused.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec.structs import replace

from shoal.core.plan import View
from shoal.fleet import health
from shoal.fleet.view import ReplicaRole
from shoal.wire.messages import Hello, Members, Register, Report, Role

SERVING = "serving"


@dataclass(slots=True)
class Entry:
    role: Role
    name: str
    incarnation: str
    session: int
    registered: Register
    since_ns: int  # first registration of this incarnation
    heard_ns: int
    connected: bool = True
    view: View | None = None
    gateway: dict[str, float | dict[str, float]] | None = None


class Registry:
    def __init__(self, first_version: int = 0) -> None:
        """`first_version` must exceed what an earlier controller may have reached: wall-clock nanoseconds will do."""
        self._version = first_version
        self._entries: dict[tuple[Role, str], Entry] = {}
        self._roles: dict[str, ReplicaRole] = {}  # of engines, set here: they win over what an engine registers with

    @property
    def version(self) -> int:
        """Grows with every change of what `members` lists."""
        return self._version

    def entries(self) -> list[Entry]:
        return [self._entries[key] for key in sorted(self._entries)]

    def members(self) -> Members:
        replicas = [e.registered.replica for e in self.entries() if e.role is Role.ENGINE]
        return Members(version=self._version, replicas=tuple(r for r in replicas if r is not None))

    def knows(self, hello: Hello) -> bool:
        """This incarnation is listed."""
        entry = self._entries.get((hello.role, hello.name))
        return entry is not None and entry.incarnation == hello.incarnation

    def is_old(self, hello: Hello) -> bool:
        """A newer session of the same incarnation is known."""
        entry = self._entries.get((hello.role, hello.name))
        return entry is not None and entry.incarnation == hello.incarnation and entry.session > hello.session

    def register(self, hello: Hello, message: Register, now_ns: int) -> str | None:
        """Why it is refused; None: it is listed."""
        if (message.replica is not None) != (hello.role is Role.ENGINE):
            return "engines, and only engines, register a replica"
        if message.replica is not None and (message.replica.name, message.replica.incarnation) != (
            hello.name,
            hello.incarnation,
        ):
            return "a replica is registered by itself"
        if self.is_old(hello):
            return f"a newer session of {hello.name} is open"
        key = (hello.role, hello.name)
        message = self._with_role(message)
        entry = self._entries.get(key)
        if entry is None or entry.incarnation != hello.incarnation:
            self._entries[key] = Entry(
                hello.role, hello.name, hello.incarnation, hello.session, message, since_ns=now_ns, heard_ns=now_ns
            )
            self._changed(hello.role)
            return None
        if entry.registered != message:
            entry.registered = message
            self._changed(hello.role)
        entry.session, entry.heard_ns, entry.connected = hello.session, now_ns, True
        return None

    def set_role(self, name: str, role: ReplicaRole) -> None:
        """Of an engine, also of its later lives. KeyError: none of that name is listed."""
        entry = self._entries[(Role.ENGINE, name)]
        self._roles[name] = role
        registered = self._with_role(entry.registered)
        if registered != entry.registered:
            entry.registered = registered
            self._changed(Role.ENGINE)

    def role(self, name: str) -> ReplicaRole | None:
        """Of a listed engine."""
        entry = self._entries.get((Role.ENGINE, name))
        replica = None if entry is None else entry.registered.replica
        return None if replica is None else replica.role

    def report(self, hello: Hello, message: Report, now_ns: int) -> bool:
        """Renews the lease. False: this process is not listed and must register."""
        entry = self._own(hello)
        if entry is None:
            return False
        entry.heard_ns, entry.view, entry.gateway = now_ns, message.view, message.gateway
        return True

    def disconnected(self, hello: Hello) -> None:
        """The lease runs on: losing the controller is no proof that a process is gone."""
        entry = self._own(hello)
        if entry is not None:
            entry.connected = False

    def expire(self, now_ns: int) -> list[str]:
        """Drop those whose lease is over; their names."""
        gone = [key for key, entry in self._entries.items() if health.expired(entry.heard_ns, now_ns)]
        for key in gone:
            del self._entries[key]
            self._changed(key[0])
        return [name for _, name in gone]

    def _own(self, hello: Hello) -> Entry | None:
        entry = self._entries.get((hello.role, hello.name))
        if entry is None or (entry.incarnation, entry.session) != (hello.incarnation, hello.session):
            return None
        return entry

    def _with_role(self, message: Register) -> Register:
        replica = message.replica
        if replica is None or replica.name not in self._roles:
            return message
        return replace(message, replica=replace(replica, role=self._roles[replica.name]))

    def _changed(self, role: Role) -> None:
        if role is Role.ENGINE:
            self._version += 1

"""The replicas that this gateway knows, and its connections to them.

The list comes from the controller (`on_members`) or from the command line; the latest one stays on disk, so that a
gateway that starts while the controller is away still serves.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from shoal.core.request import Peer
from shoal.fleet import route, scorers
from shoal.fleet.directory import Directory, Held
from shoal.fleet.scorers import Errand
from shoal.fleet.split import Reason
from shoal.fleet.view import ReplicaView
from shoal.gateway.link import EngineLink, Identity
from shoal.wire.messages import EngineInfo, Members, Replica

TICK_S = 0.25
KEEP_ALIVE_S = 1.0
LEAST_FETCH_NS = 10_000_000  # what is computed sooner is not worth asking another engine for

log = logging.getLogger("shoal.gateway")


class Place(NamedTuple):
    link: EngineLink
    cached_tokens: int  # of the prompt, that are believed to be there
    peer: Peer | None  # another replica, that holds more of it
    then: EngineLink | None = None  # where it should go on from its first token on
    reason: Reason | None = None  # why there, or why not; None: nothing was to be decided


class Replicas:
    """Owns the links and their tasks, and the directory of who holds what.

    `run` ends only by cancellation and takes the links with it.
    """

    def __init__(self, identity: Identity, *, static: Sequence[str] = (), members_file: Path | None = None) -> None:
        """`static`: engine addresses that are dialled whatever the controller says."""
        self._identity = identity
        self._static = frozenset(static)
        self._members_file = members_file
        self._members: tuple[Replica, ...] = ()
        self.directory = Directory()
        self._chance = random.Random()
        self._links = {address: self._link(address, address) for address in static}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._running = False

    async def run(self) -> None:
        self._recall()
        self._running = True
        next_keep_alive_s = 0.0
        try:
            while True:
                self._reap()
                self._start()
                self.directory.tidy()
                for link in self._links.values():
                    link.check_silence()
                if time.monotonic() >= next_keep_alive_s:
                    next_keep_alive_s = time.monotonic() + KEEP_ALIVE_S
                    for link in self._links.values():
                        link.keep_alive()
                await asyncio.sleep(TICK_S)
        finally:
            self._running = False
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    @property
    def links(self) -> Collection[EngineLink]:
        return self._links.values()

    # -- what dispatch asks --------------------------------------------------------------------------------------------

    def views(self) -> list[ReplicaView]:
        return [link.replica_view() for link in self._links.values()]

    def pick(self, errand: Errand) -> Place | None:
        held = self.directory.holders(errand.keys)
        picked = route.pick(errand, self.views(), held, self._chance.sample)
        if picked is None:
            return None
        link = self._links[picked.name]
        peer = self._peer(errand, link, picked.cached_tokens, held)
        then = self._links[picked.then] if picked.then else None
        return Place(link, picked.cached_tokens, peer, then, picked.reason)

    def _peer(self, errand: Errand, link: EngineLink, cached_tokens: int, held: Mapping[str, Held]) -> Peer | None:
        """Who holds most of the prompt on its device, if the replica may be sooner done with that than without."""
        if link.info is None or not link.info.peers:
            return None
        found = [
            (each.device, name)
            for name, each in held.items()
            if name in self._links and name != link.name and self._links[name].lends(link.info.hash_root)
        ]
        num_blocks, name = max(found, default=(0, ""))
        gain = errand.tokens_of(num_blocks) - cached_tokens
        if gain <= 0 or scorers.recompute_ns(link.costs, cached_tokens, gain) < LEAST_FETCH_NS:
            return None
        owner = self._links[name]
        assert owner.info is not None
        return Peer(owner.info.peers, owner.incarnation, num_blocks)

    @property
    def ready(self) -> bool:
        return any(link.ready for link in self._links.values())

    def info(self) -> EngineInfo | None:
        """What the replicas serve; known from the first handshake on, also while none is connected."""
        infos = [link.info for link in self._links.values() if link.info is not None]
        return min(infos, key=lambda info: info.max_model_len, default=None)

    def fewest_waiting(self, service_class: str) -> int | None:
        """Requests of the class that wait in the replica with the shortest line, by what it said last. None: no replica
        can take work."""
        return min((link.num_waiting(service_class) for link in self._links.values() if link.ready), default=None)

    # -- membership ----------------------------------------------------------------------------------------------------

    def on_members(self, members: Members) -> None:
        """A replica that is missing from the list is served until its connection ends: a controller that starts with
        an empty memory must not cut healthy streams."""
        listed = {
            replica.name: replica
            for replica in members.replicas
            if replica.address and replica.address not in self._static  # a second session would fence the first
        }
        for name, link in self._links.items():
            link.retired = name not in listed and name not in self._static
        for name, replica in listed.items():
            if name in self._links:
                self._links[name].address = replica.address  # dialled when the present connection ends
            else:
                self._links[name] = self._link(name, replica.address)
            self._links[name].role = replica.role
        if self._running:
            self._start()
        if members.replicas and members.replicas != self._members:
            self._members = members.replicas
            self._remember(members)

    def _link(self, name: str, address: str) -> EngineLink:
        return EngineLink(name, address, self._identity, self.directory)

    def _start(self) -> None:
        for name, link in self._links.items():
            if name not in self._tasks:
                self._tasks[name] = asyncio.create_task(link.run())

    def _reap(self) -> None:
        for name, task in list(self._tasks.items()):
            if not task.done():
                continue
            del self._tasks[name]
            if (failure := task.exception()) is not None:  # a fault of ours: the link starts again
                log.error("replica.link_failed", {"replica": name}, exc_info=failure)
            elif self._links[name].retired:
                del self._links[name]

    def _remember(self, members: Members) -> None:
        if self._members_file is None:
            return
        temporary = self._members_file.with_suffix(".new")
        try:
            temporary.unlink(missing_ok=True)  # whatever lies there is neither followed nor kept
            with open(temporary, "xb", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
                file.write(msgspec.json.encode(members))
            os.replace(temporary, self._members_file)
        except OSError as e:
            log.warning("members.not_written", {"file": str(self._members_file), "detail": str(e)})

    def _recall(self) -> None:
        if self._members_file is None or not self._members_file.exists():
            return
        try:
            self.on_members(msgspec.json.decode(self._members_file.read_bytes(), type=Members))
        except (OSError, msgspec.MsgspecError) as e:
            log.warning("members.not_read", {"file": str(self._members_file), "detail": str(e)})

"""Transcripts of the controller's registry. One file, one story, its name a sentence.

    at SECONDS                                time passes
    register ROLE NAME INCARNATION/SESSION [state=..] [url=..] [role=..]
    report NAME INCARNATION/SESSION           renews the lease
    disconnected NAME INCARNATION/SESSION
    expire
    set NAME ROLE                             what an engine is meant for
    ----
    what was refused or expired, then the list as gateways get it

Rewrite the expected halves with REWRITE_TRANSCRIPTS=1, then review the difference.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.controller.registry import Registry
from shoal.fleet.view import ReplicaRole
from shoal.wire.messages import Hello, Register, Replica, Report, Role

TRANSCRIPTS = sorted((Path(__file__).parent / "registry").glob("*.txt"))


class Story:
    def __init__(self) -> None:
        self.registry = Registry()
        self.roles: dict[str, Role] = {}
        self.now_ns = 0

    def act(self, command: str) -> Iterator[str]:
        verb, *words = command.split()
        if verb == "at":
            self.now_ns = int(float(words[0]) * 1e9)
        elif verb == "expire":
            yield from (f"expired: {name}" for name in self.registry.expire(self.now_ns))
        elif verb == "set":
            try:
                self.registry.set_role(words[0], ReplicaRole(words[1]))
            except KeyError:
                yield f"not listed: {words[0]}"
        elif verb == "register":
            yield from self._register(*words)
        else:
            hello = self._hello(words[0], words[1])
            if verb == "disconnected":
                self.registry.disconnected(hello)
            elif not self.registry.report(hello, Report(), self.now_ns):
                yield f"not listed: {command}"

    def shown(self) -> Iterator[str]:
        members = self.registry.members()
        yield f"version {members.version}: " + " ".join(
            f"{r.name}@{r.incarnation}({r.state}{'' if r.role == 'both' else ', ' + r.role})" for r in members.replicas
        )

    def _register(self, role: str, name: str, who: str, *options: str) -> Iterator[str]:
        self.roles[name] = Role(role)
        hello = self._hello(name, who)
        given = dict(option.split("=", 1) for option in options)
        replica = None
        if self.roles[name] is Role.ENGINE:
            as_name = given.get("as", name)
            replica = Replica(
                name=as_name,
                incarnation=hello.incarnation,
                address="unix:/e",
                state=given.get("state", "serving"),
                role=ReplicaRole(given.get("role", "both")),
            )
        why = self.registry.register(hello, Register(pid=1, replica=replica, url=given.get("url", "")), self.now_ns)
        if why is not None:
            yield f"refused: {why}"

    def _hello(self, name: str, who: str) -> Hello:
        incarnation, _, session = who.partition("/")
        return Hello(
            protocol=1,
            role=self.roles[name],
            name=name,
            incarnation=incarnation,
            session=int(session),
            nonce=b"",
            proof=b"",
        )


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)
def test_transcript(path: Path) -> None:
    story, out = Story(), []
    for block in path.read_text(encoding="utf-8").strip().split("\n\n"):
        commands = block.partition("\n----")[0]
        done = [line for command in commands.splitlines() if command[0] != "#" for line in story.act(command)]
        out.append("\n".join([commands, "----", *done, *story.shown()]))
    acted = "\n\n".join(out) + "\n"
    if os.environ.get("REWRITE_TRANSCRIPTS"):
        path.write_text(acted, encoding="utf-8")
    assert acted == path.read_text(encoding="utf-8")


def test_there_are_transcripts() -> None:
    assert len(TRANSCRIPTS) >= 4

"""Two replicas under chats and long prompts, simulated: router and schedulers are the live ones, a migration goes as in
gateway/migration.py. Part of disaggregation.py: nothing disturbs it, so it shows what is predicted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from typing import Any

from shoal.core.kv.hashing import NO_KEY, root_key
from shoal.core.limits import Limits
from shoal.core.plan import Ended, Event, Refused, Token
from shoal.core.request import Peer, RequestSpec
from shoal.core.scheduler import Scheduler
from shoal.core.stepcost import StepCost
from shoal.fleet import route
from shoal.fleet.scorers import Errand
from shoal.fleet.split import Reason
from shoal.fleet.view import ReplicaRole, ReplicaView
from shoal.gateway.migration import FEW_TOKENS, MAX_ROUNDS
from shoal.sim.agenda import Agenda
from shoal.sim.replica import Modelled, Replica

# Of the order of the default model in float32 on one core, with 46 KB of KV a token.
MACHINE = (4e7, 1.8e6, 300.0, 1.5e6, 3e3)  # of core.stepcost
BLOCK_TOKENS, TOKEN_BYTES, FETCH_BYTES_PER_S = 16, 46_080, 5e8
ROOT = root_key("simulated", "none", "none", BLOCK_TOKENS)
LIMITS = Limits(
    num_blocks=1400,
    block_tokens=BLOCK_TOKENS,
    max_model_len=4096,
    vocab_size=1 << 20,
    block_bytes=BLOCK_TOKENS * TOKEN_BYTES,
    fetch_bytes_per_s=FETCH_BYTES_PER_S,
)


class Site:
    """One replica."""

    def __init__(self, name: str, role: str, agenda: Agenda, fleet: Fleet) -> None:
        self.name = name
        self.role = ReplicaRole(role)
        self.num_tokens = 0  # of answers
        self.scheduler = Scheduler(LIMITS, hash_root=ROOT, cost=StepCost(MACHINE))
        machine = Modelled(StepCost(MACHINE), fetch_bytes_per_s=FETCH_BYTES_PER_S)
        self.replica = Replica(self.scheduler, machine, agenda, tell=partial(fleet.hear, self))

    def submit(self, spec: RequestSpec) -> None:
        self.replica.submit(spec)

    def view(self) -> ReplicaView:
        view, sent = self.scheduler.view(), self.replica._submits  # those that the next turn takes
        num_tokens = sum(len(spec.prompt) for spec in sent)
        return ReplicaView(
            name=self.name,
            ready=True,
            num_running=view.num_running,
            num_waiting=view.num_waiting,
            waiting_tokens=view.waiting_tokens,
            context_tokens=view.context_tokens,
            num_unreported=len(sent),
            unreported_tokens=num_tokens,
            unreported_new_tokens=num_tokens,
            costs=MACHINE,
            role=self.role,
            kv_root=ROOT,
            fetch_token_ns=1e9 * TOKEN_BYTES / FETCH_BYTES_PER_S,
        )


@dataclass(slots=True)
class Asked:
    """A request, from a client's point of view, and where it is."""

    spec: RequestSpec
    due_ns: int
    site: Site
    then: Site | None = None
    id: str = ""  # of the present attempt
    at_ns: list[int] = field(default_factory=list)  # each token
    round: int = 0
    missing: int = 0  # after the round before


class Fleet:
    """Two replicas, their gateway and its clients. `run` once."""

    def __init__(self, roles: Sequence[str], seed: int) -> None:
        self.agenda = Agenda()
        self.sites = {f"engine-{n}": Site(f"engine-{n}", role, self.agenda, self) for n, role in enumerate(roles)}
        self.decisions: Counter[str] = Counter()
        self.moved_tokens = 0
        self.long: list[Asked] = []
        self.chats: list[Asked] = []
        self._chance = Random(seed)
        self._open: dict[str, Asked] = {}  # by id of the attempt, or of its prefetch
        self._chat: tuple[int, int] = (0, 0)
        self._over = False

    def run(self, chats: int, chat: tuple[int, int], long: tuple[int, int], count: int, every_s: float) -> None:
        """`chats` at once, `count` long ones every so often; `chat` and `long`: tokens of prompt and answer."""
        self._chat = chat
        for number in range(chats):
            self.agenda.at(number * 300_000_000, self._next_chat)
        for number in range(count):
            due_ns = int((5.0 + number * every_s) * 1e9)
            self.agenda.at(due_ns, lambda: self.long.append(self._ask(*long, "standard")))
        self.agenda.at(int((5.0 + (count - 1) * every_s) * 1e9), self._last)
        self.agenda.run()
        for site in self.sites.values():
            site.scheduler.check()

    def _last(self) -> None:
        """Chats go on until the long ones are answered."""
        if any(len(each.at_ns) < each.spec.max_tokens for each in self.long):
            self.agenda.at(self.agenda.now_ns + 100_000_000, self._last)
        else:
            self._over = True

    def _next_chat(self) -> None:
        if not self._over:
            self.chats.append(self._ask(*self._chat, "interactive"))

    def _ask(self, num_prompt: int, num_output: int, service_class: str) -> Asked:
        prompt = tuple(self._chance.choices(range(1, LIMITS.vocab_size), k=num_prompt))
        id = str(len(self.long) + len(self.chats))
        spec = RequestSpec(id=id, prompt=prompt, max_tokens=num_output, service_class=service_class)
        errand = Errand(keys=(NO_KEY,), block_tokens=BLOCK_TOKENS, prompt_tokens=num_prompt, max_tokens=num_output)
        pick = route.pick(errand, [site.view() for site in self.sites.values()], {}, self._chance.sample)
        assert pick is not None
        if pick.reason is not None:
            self.decisions["split" if pick.reason is Reason.PAYS else f"whole/{pick.reason}"] += 1
        asked = Asked(spec, self.agenda.now_ns, self.sites[pick.name], self.sites.get(pick.then))
        self._send(asked, asked.site, id)
        return asked

    def _send(self, asked: Asked, site: Site, id: str, **more: Any) -> None:
        asked.site, asked.id = site, id
        self._open[id] = asked
        site.submit(replace(asked.spec, id=id, **more))

    def hear(self, site: Site, events: Iterable[Event | Refused]) -> None:
        for event in events:
            assert not isinstance(event, Refused), event
            asked = self._open.get(event.id)
            if asked is None:
                continue
            if isinstance(event, Token):
                site.num_tokens += 1
                asked.at_ns.append(self.agenda.now_ns)
                if asked.then is not None and not asked.round:
                    self._prefetch(asked)
            elif isinstance(event, Ended):
                del self._open[event.id]
                if event.id != asked.id:
                    self._prefetched(asked, event.cached_tokens)
                elif asked.spec.service_class == "interactive":
                    self._next_chat()

    def _so_far(self, asked: Asked) -> tuple[int, ...]:
        return asked.spec.prompt + (Modelled.TOKEN,) * len(asked.at_ns)

    def _prefetch(self, asked: Asked) -> None:
        assert asked.then is not None
        asked.round += 1
        known = self._so_far(asked)
        id, peer = f"{asked.id}.m{asked.round}", Peer(asked.site.name, "1", len(known) // BLOCK_TOKENS)
        self._open[id] = asked
        asked.then.submit(replace(asked.spec, id=id, prompt=known, max_tokens=0, peer=peer, prefetch=True))

    def _prefetched(self, asked: Asked, num_here: int) -> None:
        if asked.id not in self._open:
            return  # it is over
        missing = len(self._so_far(asked)) - num_here
        fewer = asked.round == 1 or missing < asked.missing
        if missing > FEW_TOKENS and fewer and asked.round < MAX_ROUNDS:
            asked.missing = missing
            self._prefetch(asked)
            return
        assert asked.then is not None
        self.moved_tokens += num_here
        del self._open[asked.id]
        asked.site.replica.abort(asked.id)
        self._send(asked, asked.then, asked.id + ".2", output=self._so_far(asked)[len(asked.spec.prompt) :])

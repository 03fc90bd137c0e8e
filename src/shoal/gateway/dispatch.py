"""A client request from its prompts to its deltas: placed on replicas, watched over, ended exactly once.

Order ──► Dispatcher.start ──► Job, with one Attempts per prompt ──► EngineLink.submit
EngineLink frames ──► Attempts (fleet.stream decides) ──► ChoiceOutput ──► Job.news() ──► the client
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from shoal.core.classes import ServiceClass
from shoal.core.kv import hashing
from shoal.core.request import Peer, Refusal, RequestSpec
from shoal.fleet import stream
from shoal.fleet.scorers import Errand
from shoal.gateway import choices
from shoal.gateway.errors import ApiError, Reason, internal
from shoal.gateway.job import Job, Order
from shoal.gateway.link import EngineLink
from shoal.gateway.metrics import Metrics
from shoal.gateway.migration import Migration, Outcome
from shoal.gateway.output import ChoiceOutput
from shoal.gateway.prompts import off_loop
from shoal.gateway.replicas import Place, Replicas
from shoal.gateway.text.tokenizer import Tokenizer
from shoal.wire.messages import EngineInfo, Refusing, Update

TICK_S = 0.25
MAX_MIGRATIONS = 4  # at one time, away from replicas that end: as many as a replica fetches and lends for

log = logging.getLogger("shoal.gateway")


class Attempts:
    """The choices of one prompt and the replica that works on them. Performs what `fleet.stream` decides."""

    def __init__(
        self, job: Job, prompt: int, specs: Sequence[RequestSpec], dispatcher: Dispatcher, info: EngineInfo
    ) -> None:
        self._job = job
        self._prompt = prompt
        self._specs = specs
        self._hash_root = info.hash_root  # of the specs' prefix keys
        self._block_tokens = info.hash_block_tokens
        self._dispatcher = dispatcher
        self._stream = stream.Stream(len(specs), dispatcher.budget)
        self._link: EngineLink | None = None
        self._ids: dict[int, str] = {}  # of the open attempt, by choice
        self._expected_tokens = 0  # of its prompt, that its first replica was believed to hold
        self._then: EngineLink | None = None  # is to decode what its replica computes
        self._migration: Migration | None = None  # under way
        self._seam_s: float | None = None  # when the last token came that another replica sent
        self._retry: asyncio.TimerHandle | None = None
        self._waits_since_s = job.order.asked_s  # without a slice
        self._retry_after_s: float | None = None  # as the replica that refused it says

    def place(self, avoid: frozenset[str] = frozenset()) -> None:
        place = self._dispatcher.replicas.pick(self._errand(avoid))
        if place is None:
            self._perform(self._stream.unplaced(Reason.NO_REPLICA, "no replica can take the request"))
            return
        if self._stream.begun:
            self._dispatcher.metrics.replays.inc()
        if place.reason is not None:
            self._dispatcher.metrics.split(place.reason)
        self._then = place.then
        self._send(place)

    def _send(self, place: Place) -> None:
        if not self._stream.attempt:
            self._expected_tokens = place.cached_tokens
        self._link = place.link
        self._stream.sent(place.link.name)
        specs = self._for_this_attempt(place.link, place.peer)
        self._ids = {spec.choice: spec.id for spec in specs}
        place.link.submit(specs, self, cached_tokens=place.cached_tokens)

    def _errand(self, avoid: frozenset[str]) -> Errand:
        leader = self._specs[0]
        num_delivered = max(map(len, map(self._stream.delivered, range(len(self._specs)))))
        return Errand(
            avoid=avoid,
            keys=leader.prefix_keys if leader.sampling.prompt_logprobs is None else (),  # else all is computed
            block_tokens=self._block_tokens,
            prompt_tokens=len(leader.prompt) + num_delivered,
            max_tokens=leader.max_tokens - num_delivered,
        )

    def cancel(self, why: str) -> None:
        if self._retry is not None:
            self._retry.cancel()
        self._perform(self._stream.cancel(), why)

    # -- migration -----------------------------------------------------------------------------------------------------

    @property
    def link(self) -> EngineLink | None:
        """The replica that it streams from."""
        return self._link if self._stream.phase is stream.Phase.STREAMING else None

    def delivered(self, choice: int) -> Sequence[int]:
        """Its tokens so far."""
        return self._stream.delivered(choice)

    @property
    def migrating(self) -> bool:
        return self._migration is not None

    def elsewhere(self) -> EngineLink | None:
        """Another replica, the best one, where it could go on."""
        if self._link is None:
            return None
        place = self._dispatcher.replicas.pick(self._errand(frozenset({self._link.name})))
        target = place and (place.then or place.link)
        return None if target is self._link else target

    def migrate(self, target: EngineLink) -> bool:
        """Begins to migrate it there, unless that cannot be done or is on its way already."""
        source = self.link
        if source is None or self._migration is not None or source is target or not target.ready:
            return False
        infos = [each.info for each in (source, target)]  # a source that ends lends all the same
        if any(info is None or not info.peers or info.hash_root != self._hash_root for info in infos):
            return False
        self._migration = Migration(source, target, self._so_far, self._migration_over)
        self._migration.begin()
        return True

    def _so_far(self) -> list[RequestSpec]:
        if self.link is None:
            return []
        return [
            replace(self._specs[choice], prompt=self._specs[choice].prompt + tuple(self._stream.delivered(choice)))
            for choice in self._stream.open_choices()
        ]

    def _migration_over(self, outcome: Outcome) -> None:
        migration, self._migration = self._migration, None
        assert migration is not None
        if outcome is Outcome.MIGRATED:
            self._perform(self._stream.migrated(), "migrated")
            num_tokens = len(self._specs[0].prompt) + len(self._stream.delivered(self._stream.open_choices()[0]))
            self._seam_s = time.monotonic() if self._job.last_token_s is None else self._job.last_token_s
            self._send(Place(migration.target, num_tokens, None))  # what is missing is sooner computed
        self._dispatcher.metrics.migrations.labels(outcome).inc()
        log.info("request.migrated", {"id": self._job.order.id, "outcome": outcome, "to": migration.target.name})

    # -- what the link reports -----------------------------------------------------------------------------------------

    def on_update(self, choice: int, update: Update) -> None:
        try:
            self._update(choice, update)
        except Exception:  # a fault of ours in one request's text must not take the link's other streams along
            log.exception("request.failed", {"id": self._job.order.id})
            self._perform(self._stream.cancel(), Reason.INTERNAL)
            self._job.fail(internal())

    def on_refused(self, choice: int, refusing: Refusing) -> None:
        if refusing.retry_after_ms:
            self._retry_after_s = refusing.retry_after_ms / 1000
            self._dispatcher.expect_room(self._job.order.terms.service_class, self._retry_after_s)
        self._perform(self._stream.refused(refusing.reason, refusing.message))

    def on_lost(self, message: str) -> None:
        self._perform(self._stream.lost(Reason.REPLICA_LOST, message))

    def _update(self, choice: int, update: Update) -> None:
        if update.waited_ns is not None:
            self._job.began(update.waited_ns)
        if update.waited_ns is not None or update.tokens:
            self._waits_since_s = time.monotonic()
        if update.tokens and self._seam_s is not None:
            self._dispatcher.metrics.migration_pause.observe(time.monotonic() - self._seam_s)
            self._seam_s = None
        if not (update.tokens or update.prompt_logprobs or update.ending):
            return  # nothing of the answer came back, so the request can still start over elsewhere
        if update.prompt_logprobs:
            broken = self._stream.scored(update.prompt_start, len(update.prompt_logprobs))
            if not broken:
                self._job.prompt_scores[self._prompt].extend(update.prompt_logprobs)
            self._perform(broken)
        ending = update.ending
        end = None if ending is None else (ending.reason, ending.stop_token, ending.cached_tokens, ending.message)
        self._perform(self._stream.update(choice, update.index, update.tokens, update.logprobs, end))
        if update.tokens and self._then is not None:
            then, self._then = self._then, None
            self.migrate(then)

    # -- effects -------------------------------------------------------------------------------------------------------

    def _perform(self, effects: Sequence[stream.Effect], why: str = "error") -> None:
        for effect in effects:
            match effect:
                case stream.Deliver():
                    self._deliver(effect)
                case stream.Ended():
                    self._end(effect)
                case stream.Withdraw():
                    self._withdraw(effect.choices, why)
                case stream.SendAgain():
                    self._send_again(effect)
                case stream.Failed():
                    failure = ApiError(effect.reason, effect.message, retry_after_s=self._retry_after_s)
                    self._job.fail(failure)

    def _withdraw(self, choices: Sequence[int], why: str) -> None:
        if self._link is not None:
            self._link.abort([self._ids[choice] for choice in choices], why)
        if self._migration is not None and self.link is None:
            self._migration.give_up()

    def _output(self, choice: int) -> ChoiceOutput:
        return self._job.outputs[self._prompt * len(self._specs) + choice]

    def _deliver(self, effect: stream.Deliver) -> None:
        output = self._output(effect.choice)
        self._job.observe(output.choice, len(effect.tokens))
        delta = output.feed(effect.tokens, effect.logprobs, effect.num_silent)
        if delta is not None:
            self._job.add(delta)
        if output.finish is not None:
            self._perform(self._stream.enough(effect.choice), "stop_string")

    def _end(self, effect: stream.Ended) -> None:
        output = self._output(effect.choice)
        if effect.choice == 0:
            # Of a replay, what the first replica had to compute is cached at the next: none of the client's savings.
            cached_tokens = effect.cached_tokens if self._stream.attempt == 1 else self._expected_tokens
            self._job.cached_tokens += cached_tokens
            self._dispatcher.metrics.prefix(len(self._specs[0].prompt), self._expected_tokens, cached_tokens)
        if output.finish is None:
            self._job.add(output.end(effect.reason))

    def _send_again(self, effect: stream.SendAgain) -> None:
        if not self._stream.begun:
            self._dispatcher.metrics.retries.inc()
        detail = {"attempt": self._stream.attempt + 1, "begun": self._stream.begun}
        log.info("request.retried", {"id": self._job.order.id} | detail)
        wait_s = effect.wait_ms / 1000 * random.uniform(1.0, 2.0)
        self._retry = asyncio.get_running_loop().call_later(wait_s, self.place, effect.avoid)

    def _for_this_attempt(self, link: EngineLink, peer: Peer | None) -> Sequence[RequestSpec]:
        """Ids are unique in the fleet, so a later attempt has its own. Keys made for another root would be wrong."""
        same_root = link.info is not None and link.info.hash_root == self._hash_root
        suffix = "" if self._stream.attempt == 1 else f".{self._stream.attempt}"
        waited_ns = int((time.monotonic() - self._waits_since_s) * 1e9)
        specs = [self._specs[choice] for choice in self._stream.open_choices()]
        leader = specs[0].id + suffix
        if not self._stream.delivered(0):
            self._job.prompt_scores[self._prompt].clear()  # they come again
        return [
            replace(
                spec,
                id=spec.id + suffix,
                leader=None if spec is specs[0] else leader,
                output=tuple(self._stream.delivered(spec.choice)),
                sampling=replace(spec.sampling, prompt_logprobs=None) if self._stream.delivered(0) else spec.sampling,
                waited_ns=waited_ns,
                prefix_keys=spec.prefix_keys if same_root else (),
                peer=peer if same_root else None,
            )
            for spec in specs
        ]


class Dispatcher:
    """Starts jobs and watches their limits. Owns the jobs under way and the retry budget."""

    def __init__(
        self,
        replicas: Replicas,
        tokenizer: Tokenizer,
        metrics: Metrics,
        classes: Mapping[str, ServiceClass],
        request_timeout_s: float,
    ) -> None:
        self.replicas = replicas
        self.metrics = metrics
        self.budget = stream.RetryBudget()
        self.draining = False
        self._tokenizer = tokenizer
        self._classes = classes
        self._request_timeout_s = request_timeout_s
        self._jobs: dict[str, Job] = {}
        self._room_s: dict[str, float] = {}  # by class: when a replica last predicted to have room again

    @property
    def num_jobs(self) -> int:
        return len(self._jobs)

    def queued(self) -> dict[str, int]:
        """Requests that no replica has begun, by class."""
        return Counter(job.order.terms.service_class for job in self._jobs.values() if job.queued)

    def info(self) -> EngineInfo:
        """What can be served. Raises ApiError where that is not known or nothing may begin."""
        if self.draining:
            raise ApiError(Reason.SHUTTING_DOWN, "this gateway is shutting down")
        info = self.replicas.info()
        if info is None:
            raise ApiError(Reason.NO_REPLICA, "no replica is ready yet")
        return info

    def check_room(self, service_class: str) -> None:
        """Raises ApiError where the line for the class was full in every replica just now. They would say the same, but
        not before their present step is done."""
        limit = self._classes[service_class].max_queue
        waiting = self.replicas.fewest_waiting(service_class)
        if waiting is not None and waiting >= limit:
            now_s = time.monotonic()
            raise ApiError(
                Refusal.QUEUE_FULL,
                f"{waiting} requests of class {service_class} wait; the limit is {limit}",
                retry_after_s=self._room_s.get(service_class, now_s) - now_s,
            )

    def expect_room(self, service_class: str, in_s: float) -> None:
        """A replica that refused a request of the class said when to come back."""
        self._room_s[service_class] = time.monotonic() + in_s

    async def start(self, order: Order) -> Job:
        """Submits every prompt. Failures, also of this first try, come out of `Job.news`. `finish` must follow."""
        info = self.info()
        self.budget.request()
        job = Job(order, self.metrics, self._tokenizer)
        placed: list[Attempts] = []
        for prompt in range(len(order.prompts)):
            specs = await self._specs(order, prompt, info)
            placed.append(Attempts(job, prompt, specs, self, info))
        job.attempts.extend(placed)
        self._jobs[order.id] = job
        for attempts in placed:
            if job.failure is None:
                attempts.place()
        return job

    def finish(self, job: Job) -> None:
        """The client's answer is over, one way or another: whatever replicas still do for it is withdrawn."""
        job.cancel("abandoned")
        self._jobs.pop(job.order.id, None)

    async def run(self) -> None:
        """Request time-outs and comment lines, for all jobs together. Ends by cancellation."""
        while True:
            now = time.monotonic()
            for job in list(self._jobs.values()):
                limit_s = self._request_timeout_s if job.order.timeout_s is None else job.order.timeout_s
                if now - job.order.arrived_s > limit_s:
                    job.fail(ApiError(Reason.TIMEOUT, f"not done within {limit_s:g} s"))
                job.nudge(now)
            self._evacuate()
            self.metrics.in_flight.set(len(self._jobs))
            self.metrics.replicas_ready.set(sum(view.ready for view in self.replicas.views()))
            self.metrics.directory_blocks.set(self.replicas.directory.num_held)
            self.metrics.directory_bytes.set(self.replicas.directory.num_bytes)
            await asyncio.sleep(TICK_S)

    def _evacuate(self) -> None:
        """Streams leave replicas that are about to end, a few at a time."""
        if not any(link.draining for link in self.replicas.links):
            return
        streams = [attempts for job in self._jobs.values() for attempts in job.attempts]
        num_migrating = sum(attempts.migrating for attempts in streams)
        for attempts in streams:
            if num_migrating >= MAX_MIGRATIONS:
                return
            if attempts.link is not None and attempts.link.draining and not attempts.migrating:
                target = attempts.elsewhere()
                num_migrating += target is not None and attempts.migrate(target)

    def fail_all(self) -> None:
        for job in list(self._jobs.values()):
            job.fail(ApiError(Reason.SHUT_DOWN, "this gateway shut down before the answer was complete"))

    async def _specs(self, order: Order, prompt: int, info: EngineInfo) -> list[RequestSpec]:
        params, ids = order.params, order.prompts[prompt].ids
        scope = hashing.scope_key(info.hash_root, order.terms.tenant)  # the salt of the specs
        keys = await off_loop(lambda: hashing.chain(scope, ids, info.hash_block_tokens), 4 * len(ids))
        return choices.specs(
            order.id,
            ids,
            order.max_tokens[prompt],
            params,
            self._tokenizer,
            first=prompt * params.n,
            prefix_keys=keys,
            terms=order.terms,
        )

"""What a request must come to, told without a scheduler; and the random work that the property tests feed it."""

from __future__ import annotations

import random
from collections.abc import Callable
from zlib import crc32

from shoal.core.plan import Ended, Event, PromptScored, Token
from shoal.core.request import Finish, RequestSpec, Sampling

VOCAB = 40
STOP = (0, 1)


def sample(id: str, index: int) -> int:
    """A sampler that is a pure function of the request and the place, as the real one is."""
    return crc32(f"{id}/{index}".encode()) % VOCAB


def expected_output(spec: RequestSpec, choose: Callable[[str, int], int] = sample) -> tuple[list[int], Finish]:
    output = list(spec.output)
    while len(output) < spec.max_tokens:
        output.append(choose(spec.id, len(output)))
        if output[-1] in spec.stop_token_ids and len(output) >= spec.min_tokens:
            return output, Finish.STOP
    return output, Finish.LENGTH


class Client:
    """Listens to one request's events and holds them against what must come."""

    def __init__(self, spec: RequestSpec) -> None:
        self.spec = spec
        self.output = list(spec.output)
        self.scored = 1
        self.ended: Ended | None = None

    def hear(self, event: Event) -> None:
        assert self.ended is None, f"{event} after the end"
        if isinstance(event, Token):
            assert event.index == len(self.output), f"{event} comes at place {len(self.output)}"
            self.output.append(event.token)
        elif isinstance(event, PromptScored):
            assert event.start == self.scored
            tokens = self.spec.prompt[event.start : event.start + len(event.entries)]
            assert [entry.logprob for entry in event.entries] == [-float(token) for token in tokens]
            self.scored += len(event.entries)
        elif isinstance(event, Ended):
            self.ended = event
            self._judge(event)

    def _judge(self, event: Ended) -> None:
        assert event.num_output == len(self.output)
        assert event.cached_tokens <= len(self.spec.prompt)
        output, reason = expected_output(self.spec)
        if event.reason is Finish.ABORT:
            assert self.output == output[: len(self.output)]
            return
        assert (self.output, event.reason) == (output, reason)
        assert (event.stop_token is not None) == (reason is Finish.STOP)
        if self.spec.sampling.prompt_logprobs is not None:
            assert self.scored == len(self.spec.prompt)


def random_specs(chance: random.Random, number: int) -> list[RequestSpec]:
    """One client request: 1 to 3 choices of one prompt, often with a beginning that others have too."""
    prompt = tuple(chance.randrange(8) for _ in range(chance.choice((1, 2, 7, 16, 20))))
    if chance.random() < 0.6:
        shared = tuple(range(chance.choice((4, 8, 12, 16, 17, 24))))
        prompt = shared + prompt[: chance.choice((0, 1, 5))]
    max_tokens = chance.choice((0, 1, 3, 9, 14, 24))
    output: tuple[int, ...] = ()
    if chance.random() < 0.2 and max_tokens:
        output = tuple(5 + chance.randrange(8) for _ in range(chance.randrange(max_tokens + 1)))
    first = f"r{number}.0"
    service_class = chance.choice(("standard", "standard", "interactive", "batch"))
    tenant = chance.choice(("", "acme", "zenith"))
    return [
        RequestSpec(
            id=f"r{number}.{choice}",
            prompt=prompt,
            output=output,
            max_tokens=max_tokens,
            min_tokens=chance.choice((0, 0, 4)),
            stop_token_ids=chance.choice(((), (), STOP)),
            priority=chance.choice((0, 0, 0, 1, 7)),
            service_class=service_class,
            tenant=tenant,
            choice=choice,
            leader=first if choice else None,
            salt=chance.choice(("", "", "acme")) if not choice else "",
            sampling=Sampling(prompt_logprobs=chance.choice((None, None, None, 0))),
        )
        for choice in range(chance.choice((1, 1, 1, 2, 3)))
    ]

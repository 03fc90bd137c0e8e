"""What gateways are told of blocks: everything once, every change, in pieces; and a real engine that tells it."""

from __future__ import annotations

import asyncio
import random

import pytest

from shoal.core.kv.hashing import block_key, chain, root_key, scope_key
from shoal.core.kv.news import DEVICE, HOST, TIERS, KvEvent
from shoal.engine import holdings, sessions
from shoal.engine.holdings import PIECE_BLOCKS, Feed, Holdings
from shoal.fleet.directory import Directory
from shoal.wire import codec
from shoal.wire import connection as wire
from shoal.wire.messages import Announce, Frame
from tests.processes.test_engine_server import ENDLESS, address, engine, submit, until_ended
from tests.support.scripted import Script
from tests.support.wires import VIEW, connect, next_of

SCOPE = scope_key(root_key("scripted", "float32", "none", 16), "")


def stored(keys: list[bytes], tier: int = DEVICE) -> list[KvEvent]:
    return [(key, parent, tier, True) for key, parent in zip(keys, [b"", *keys], strict=False)]


def many(count: int) -> list[bytes]:
    return [block_key(b"many", (number,)) for number in range(count)]


class Gateway:
    """Listens to one feed, now and then."""

    def __init__(self, feed: Feed, directory: Directory, name: str) -> None:
        self.feed = feed
        self.num_told = 0
        self._directory = directory
        self._name = name

    def hear(self, num_pieces: int = 1 << 30) -> None:
        while self.feed and num_pieces:
            num_pieces -= 1
            news = self.feed.piece()
            if news.first == 0:
                self._directory.forget(self._name)
            else:
                assert news.first == self.num_told
            self.num_told = news.first + len(news.tiers)
            self._directory.tell(self._name, news.keys, news.parents, news.tiers)


@pytest.mark.parametrize("seed", range(20))
def test_whoever_listens_knows_in_the_end_what_is_held(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small pieces, a small bound, gateways that come late, listen rarely and go."""
    monkeypatch.setattr(holdings, "PIECE_BLOCKS", 5)
    monkeypatch.setattr(holdings, "MAX_WAITING", 40)
    chance = random.Random(seed)
    mine, directory = Holdings(), Directory(max_entries=5000)
    prompts = [chain(SCOPE, [chance.randrange(3) for _ in range(8)], 1) for _ in range(60)]
    tiers: dict[bytes, int] = {}
    gateways: list[Gateway] = []
    for step in range(300):
        events = []
        for _ in range(chance.randrange(3)):
            keys = list(chance.choice(prompts))
            if chance.random() < 0.6:
                events += stored(keys, tier := chance.choice(TIERS))
                tiers.update({key: tiers.get(key, 0) | tier for key in keys})
            elif chance.random() < 0.3:  # gone from one tier, and still in another
                for key in keys:
                    if (left := tiers.get(key, 0) & ~DEVICE) and tiers[key] & DEVICE:
                        events.append((key, b"", DEVICE, False))
                        tiers[key] = left
            elif keys[0] in tiers:  # gone from everywhere, with whatever depends on it
                victim = chance.choice([key for key in keys if key in tiers])
                for other in prompts:
                    if victim in other:
                        for key in reversed(other[other.index(victim) :]):
                            had = tiers.pop(key, 0)
                            events += [(key, b"", tier, False) for tier in TIERS if had & tier]
        mine.take(events)
        if step % 40 == 0:
            gateways.append(Gateway(mine.follow(), directory, f"engine as {step} knows it"))
        if chance.random() < 0.02 and len(gateways) > 1:
            mine.leave(gateways.pop(0).feed)
        for gateway in gateways:
            if chance.random() < 0.3:
                gateway.hear(chance.randrange(4))
    for gateway in gateways:
        gateway.hear()
    for prompt in prompts:
        found = directory.holders(prompt)
        blocks = next((n for n, key in enumerate(prompt) if key not in tiers), len(prompt))
        on_device = next((n for n, key in enumerate(prompt) if not tiers.get(key, 0) & DEVICE), len(prompt))
        for gateway in gateways:
            held = found.get(gateway._name)
            assert (held.blocks if held else 0) == blocks and (held.device if held else 0) == on_device
    assert not directory.num_left_out, "no block comes before the one that it depends on"


def test_a_piece_is_at_most_64_kb_and_changes_wait_for_the_whole() -> None:
    mine = Holdings()
    keys = many(2 * PIECE_BLOCKS)
    mine.take(stored(keys))
    feed = mine.follow()
    frame = codec.encode(Frame(view=VIEW, kv=feed.piece()))
    assert 60_000 < len(frame) <= 64 << 10
    mine.take([(keys[0], b"", DEVICE, False), *stored(many(1)[:1], HOST)])
    assert feed.in_full and len(feed.piece().tiers) == PIECE_BLOCKS
    assert not feed.in_full and feed
    change = feed.piece()
    assert (change.first, change.keys, change.tiers) == (2 * PIECE_BLOCKS, keys[0], bytes([HOST]))
    assert not feed


def test_a_block_that_is_left_in_one_tier_still_comes_after_its_parent() -> None:
    mine, keys = Holdings(), list(chain(SCOPE, range(2), 1))
    mine.take([*stored(keys), *stored(keys, HOST), (keys[1], b"", DEVICE, False)])
    news = mine.follow().piece()
    assert (news.keys, news.parents) == (b"".join(keys), bytes(16) + keys[0])
    assert news.tiers == bytes([DEVICE | HOST, HOST])


async def frames_with_kv(gateway: wire.Connection, count: int) -> list[Frame]:
    """The next frames until so many blocks were told."""
    frames: list[Frame] = []
    while sum(len(frame.kv.tiers) for frame in frames if frame.kv) < count:
        frame = await next_of(gateway, Frame)
        assert isinstance(frame, Frame)
        frames.append(frame)
    return frames


async def test_an_engine_tells_every_gateway_what_it_stores_whoever_asked_for_it() -> None:
    prompt = tuple(range(100, 164))
    keys = chain(SCOPE, prompt, 16)
    async with engine(Script(step_ms=1)) as server:
        asks, listens = await connect(address(server), name="asks"), await connect(address(server), name="listens")
        asks.send(submit("a", 4, prompt))
        for gateway in (asks, listens):
            frames = await frames_with_kv(gateway, 4)
            told = [frame.kv for frame in frames if frame.kv]
            assert b"".join(news.keys for news in told) == b"".join(keys)
            assert b"".join(news.parents for news in told) == bytes(16) + b"".join(keys[:3])
            assert told[0].first == 0
        late = await connect(address(server), name="late")
        assert b"".join(frame.kv.keys for frame in await frames_with_kv(late, 4) if frame.kv) == b"".join(keys)


async def test_a_large_cache_is_told_in_pieces_while_tokens_come_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "KV_S", 0.01)
    num_blocks = 10 * PIECE_BLOCKS
    async with engine(Script(step_ms=1)) as server:
        server._holdings.take(stored(many(num_blocks)))
        gateway = await connect(address(server))
        gateway.send(submit("a", 2000))
        frames = await frames_with_kv(gateway, num_blocks)
        pieces = [frame for frame in frames if frame.kv]
        assert max(len(frame.kv.tiers) for frame in pieces if frame.kv) <= PIECE_BLOCKS
        steps = [frame.view.step for frame in frames if frame.updates]
        assert steps == sorted(set(steps)) and len(steps) > len(pieces), "frames with tokens go on between the pieces"


async def test_a_gateway_that_reads_slowly_hears_the_end_and_not_every_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "OUTBOX_S", 30.0)
    monkeypatch.setattr(holdings, "MAX_WAITING", 100)
    keys = many(150)
    async with engine(ENDLESS) as server:
        gateway = await connect(address(server))
        server._holdings.take(stored(many(1)))
        await frames_with_kv(gateway, 1)
        (session,) = server._sessions.values()
        gateway._transport.pause_reading()
        while session.connection.writable:
            session.connection.send(Announce(what="x" * 50_000, predicted_ns=0))
        for key in keys:  # all that was told before does not count any more
            server._holdings.take([(key, b"", DEVICE, True)])
            session.kv_changed()
        await asyncio.sleep(0)
        gateway._transport.resume_reading()
        frames = await frames_with_kv(gateway, 150)  # the 101st change began it anew; then come those that followed
        told = [frame.kv for frame in frames if frame.kv and frame.kv.tiers]
        assert told[0].first == 0 and sum(len(news.tiers) for news in told) == 150
        gateway.send(submit("a", 3))
        await until_ended(gateway, "a")

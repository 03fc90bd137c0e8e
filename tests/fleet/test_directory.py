"""Who holds what: against a dictionary that keeps everything, and what is given up when there is no room."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest

from shoal.core.kv.hashing import NO_KEY, block_key
from shoal.core.kv.news import DEVICE, DISK, HOST
from shoal.fleet import holders as sets
from shoal.fleet.directory import Directory, Held

REPLICAS = ("a", "b", "c")


def chain(*labels: int) -> list[bytes]:
    """Keys of a prompt whose blocks are these."""
    keys = []
    parent = b"scope"
    for label in labels:
        parent = block_key(parent, (label,))
        keys.append(parent)
    return keys


def tell(directory: Directory, replica: str, keys: list[bytes], tiers: int = DEVICE) -> None:
    parents = b"".join((NO_KEY, *keys))[: 16 * len(keys)]
    directory.tell(replica, b"".join(keys), parents, bytes([tiers]) * len(keys))


def drop(directory: Directory, replica: str, keys: list[bytes]) -> None:
    """The last one first."""
    directory.tell(replica, b"".join(reversed(keys)), NO_KEY * len(keys), bytes(len(keys)))


class Naive:
    """Everything it was told, word for word."""

    def __init__(self) -> None:
        self.tiers: dict[str, dict[bytes, int]] = defaultdict(dict)

    def holders(self, keys: list[bytes]) -> dict[str, Held]:
        found = {}
        for replica, held in self.tiers.items():
            depths = []
            for good in (DEVICE, DEVICE | HOST, DEVICE | HOST | DISK):
                depth = 0
                while depth < len(keys) and held.get(keys[depth], 0) & good:
                    depth += 1
                depths.append(depth)
            if depths[-1]:
                found[replica] = Held(*depths)
        return found


@pytest.mark.parametrize("seed", range(20))
def test_it_answers_as_one_that_keeps_everything(seed: int) -> None:
    chance = random.Random(seed)
    directory, naive = Directory(max_entries=4000), Naive()
    prompts = [
        chain(*[chance.randrange(2) for _ in range(4)], *[chance.randrange(9) for _ in range(6)]) for _ in range(30)
    ]
    for _ in range(400):
        replica, keys = chance.choice(REPLICAS), chance.choice(prompts)
        held = naive.tiers[replica]
        what = chance.random()
        if what < 0.5:
            keys, tiers = keys[: chance.randint(1, len(keys))], chance.choice((DEVICE, HOST, DEVICE | HOST, DISK, 7))
            tell(directory, replica, keys, tiers)
            held.update(dict.fromkeys(keys, tiers))
        elif what < 0.8:
            gone = [key for key in keys if key in held][-chance.randint(1, 4) :]
            for key in gone:  # and with it what is after it
                for other in prompts:
                    if key in other:
                        for later in reversed(other[other.index(key) :]):
                            if held.pop(later, 0):
                                drop(directory, replica, [later])
        elif what < 0.85:  # lost; perhaps it comes back and tells everything
            directory.forget(replica)
            back, naive.tiers[replica] = dict(held) if chance.random() < 0.5 else {}, {}
            for known in prompts:
                mine = [key for key in known if key in back]
                tell(directory, replica, mine)
                naive.tiers[replica].update(dict.fromkeys(mine, DEVICE))
        elif what < 0.9:
            directory.tidy(50)
        for keys in chance.sample(prompts, 8):
            assert directory.holders(keys) == naive.holders(keys)
        assert directory.num_held == len(set().union(*naive.tiers.values()))
    assert not directory.num_left_out and not directory.num_given_up
    for replica in REPLICAS:
        directory.forget(replica)
    assert not any(directory.holders(keys) for keys in prompts)
    directory.tidy()
    directory.tidy()
    assert len(directory) == directory.num_held == 0, "nothing is left behind"


@pytest.mark.parametrize("seed", range(10))
def test_where_it_is_full_it_forgets_but_never_invents(seed: int) -> None:
    chance = random.Random(seed)
    directory, naive = Directory(max_entries=60), Naive()
    for _ in range(600):
        replica = chance.choice(REPLICAS)
        keys = chain(chance.randrange(3), *[chance.randrange(4) for _ in range(chance.randint(1, 9))])
        tell(directory, replica, keys)
        naive.tiers[replica].update(dict.fromkeys(keys, DEVICE))
        truth = naive.holders(keys)
        for name, held in directory.holders(keys).items():
            assert held.blocks <= truth[name].blocks
        assert len(directory) <= 60
    assert directory.num_given_up > 100


def test_the_ends_of_prefixes_go_first_and_not_what_was_found_since() -> None:
    directory = Directory(max_entries=30)
    old, found, new = (chain(number, *range(9)) for number in (1, 2, 3))
    for keys in (found, old, new):
        tell(directory, "a", keys)
    assert directory.holders(found)["a"].blocks == 10
    tell(directory, "a", chain(4, *range(6)))
    assert directory.holders(chain(4, *range(6)))["a"].blocks == 7
    left = {name: directory.holders(keys)["a"].blocks for name, keys in (("found", found), ("old", old), ("new", new))}
    assert left["found"] == 10 and sum(left.values()) == 23
    assert directory.num_given_up == 7 and not directory.num_left_out


def test_a_block_whose_beginning_is_unknown_is_left_out() -> None:
    directory = Directory(max_entries=30)
    keys = chain(1, 2, 3)
    directory.tell("a", keys[2], keys[1], bytes([DEVICE]))
    assert not len(directory) and directory.num_left_out == 1
    assert directory.holders(keys) == {}


def test_what_is_dropped_in_the_middle_hides_the_rest_until_it_is_back() -> None:
    directory = Directory(max_entries=30)
    keys = chain(1, 2, 3, 4)
    tell(directory, "a", keys)
    directory.tell("a", keys[1], NO_KEY, bytes(1))
    assert directory.holders(keys) == {"a": Held(1, 1, 1)}
    directory.tell("a", keys[1], keys[0], bytes([HOST]))
    assert directory.holders(keys) == {"a": Held(1, 4, 4)}


def test_a_guess_of_what_was_sent_counts_as_held() -> None:
    directory = Directory(max_entries=30)
    keys = chain(1, 2, 3)
    directory.sent("foreign", keys)
    directory.sent("foreign", [])
    assert directory.holders([*keys, *chain(7)]) == {"foreign": Held(3, 3, 3)}


@pytest.mark.parametrize(
    ("keys", "parents", "tiers"),
    [(bytes(15), NO_KEY, b"\1"), (NO_KEY, bytes(32), b"\1"), (NO_KEY, NO_KEY, b""), (NO_KEY, NO_KEY, b"\x08")],
)
def test_what_makes_no_sense_is_an_error(keys: bytes, parents: bytes, tiers: bytes) -> None:
    with pytest.raises(ValueError, match="bytes of keys"):
        Directory(max_entries=30).tell("a", keys, parents, tiers)


def test_combinations_of_holders_that_it_has_no_room_for_cost_hints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sets, "MAX_SETS", 4)  # nobody and three more
    directory = Directory(max_entries=100)
    for label in range(1, 6):
        for number in range(label):
            tell(directory, f"r{number}", chain(label))
        assert len(directory.holders(chain(label))) == min(label, 3)
    tell(directory, "late", chain(6))
    assert directory.holders(chain(6)) == {} and len(directory) == 5
    directory.forget("r1")
    directory.forget("r2")
    assert set(directory.holders(chain(5))) == {"r0"}
    for label in range(2, 6):
        drop(directory, "r0", chain(label))  # the three are one now, and go when their users do
    tell(directory, "late", chain(6))
    assert set(directory.holders(chain(6))) == {"late"} and set(directory.holders(chain(1))) == {"r0"}

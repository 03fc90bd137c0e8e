"""Prefix keys: the cases KV-01 and KV-02 as far as they concern keys, and that a chain is a chain."""

from __future__ import annotations

import random
from hashlib import sha256
from itertools import combinations

from shoal.core.kv.hashing import KEY_BYTES, Media, block_key, chain, root_key, scope_key

TOKENS = tuple(range(64))


def _first_two(
    model: str = "m",
    dtype: str = "bf16",
    block: int = 16,
    lora: str = "",
    version: int = 0,
    salt: str = "",
    mm: Media = (),
) -> tuple[bytes, bytes]:
    scope = scope_key(root_key(model, dtype, "1", block), salt, lora, version)
    first = block_key(scope, TOKENS[:block], mm)
    return first, block_key(first, TOKENS[block : 2 * block])


def test_kv_01_adapter_salt_image_model_and_layout_never_share_a_key() -> None:
    variants = [
        _first_two(),
        _first_two(lora="X"),
        _first_two(salt="X"),
        _first_two(mm=(("X", 0),)),
        _first_two(lora="X", version=2),
        _first_two(lora="X|Y"),
        _first_two(lora="X", salt="Y"),
        _first_two(lora="Y", salt="X"),
        _first_two(lora="XY"),
        _first_two(salt="XY"),
        _first_two(model="other"),
        _first_two(dtype="fp8"),
        _first_two(block=32),
        _first_two(mm=(("imgA", 0),)),
        _first_two(mm=(("imgB", 0),)),
        _first_two(mm=(("imgA", 8),)),
        _first_two(mm=(("imgA", 0), ("imgB", 0))),
    ]
    for a, b in combinations(variants, 2):
        assert a[0] != b[0] and a[1] != b[1]
    assert _first_two(salt="") == _first_two(), "an empty salt is no salt"


def test_kv_02_a_contents_equal_under_a_polynomial_have_different_keys() -> None:
    assert block_key(b"p", [100, 200, 7, 9]) != block_key(b"p", [131, 199, 7, 9])


def test_kv_02_b_image_digests_that_agree_in_16_bits_have_different_keys() -> None:
    seen: dict[bytes, str] = {}
    for number in range(100_000):
        digest = sha256(str(number).encode()).hexdigest()
        other = seen.setdefault(bytes.fromhex(digest[:4]), digest)
        if other != digest:
            assert block_key(b"p", TOKENS[:16], ((digest, 0),)) != block_key(b"p", TOKENS[:16], ((other, 0),))
            return
    raise AssertionError("no pair found")


def test_kv_02_c_random_blocks_never_share_a_key() -> None:
    chance = random.Random(2)
    keys, contents = set(), set()
    parents = [scope_key(b"root", str(number)) for number in range(50)]
    for _ in range(200_000):
        parent, tokens = chance.choice(parents), tuple(chance.choices(range(4), k=16))
        contents.add((parent, tokens))
        keys.add(block_key(parent, tokens))
    assert len(keys) == len(contents)
    assert {len(key) for key in keys} == {KEY_BYTES} and KEY_BYTES * 8 >= 128


def test_a_chain_holds_full_blocks_and_each_key_names_the_whole_prefix() -> None:
    scope = scope_key(b"root")
    keys = chain(scope, TOKENS[:50], 16)
    assert len(keys) == 3 and chain(scope, TOKENS[:15], 16) == ()
    assert keys[1] == block_key(keys[0], TOKENS[16:32])
    changed = (TOKENS[0] + 1, *TOKENS[1:50])
    assert not set(keys) & set(chain(scope, changed, 16))


def test_a_key_is_the_same_in_every_process_and_version() -> None:
    """Keys travel on the wire and lie on disks; whoever changes the encoding must raise its schema number."""
    scope = scope_key(root_key("m", "bf16", "1", 16), "salt", "adapter", 1)
    assert block_key(scope, range(16)).hex() == "672ff78893c736abedeae49b4b4490c2"

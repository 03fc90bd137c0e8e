"""The keys under which KV blocks are found: 16 bytes of BLAKE2b over a tagged, length-prefixed encoding.

    root  = H("root",  schema, model digest, KV dtype, KV format, block size)      what the bytes in a block mean
    scope = H("scope", root, salt, adapter, adapter version)                       who may share them
    key 0 = H("block", scope, token ids of block 0, media of block 0)
    key i = H("block", key i-1, token ids of block i, media of block i)            hence a key names a whole prefix

No two fields can run into each other, since each is written with its length. Engine, tiers and router use these
functions and no others. An empty salt is no salt, and an empty adapter no adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from hashlib import blake2b
from struct import Struct, pack

KEY_BYTES = 16
NO_KEY = bytes(KEY_BYTES)  # as the key of the block before a prompt's first, where a key must stand
_SCHEMA = 1

Media = tuple[tuple[str, int], ...]  # (digest of the item, offset of the block's first token in it)


def root_key(model_digest: str, kv_dtype: str, kv_format: str, block_tokens: int) -> bytes:
    return _digest(b"root", _SCHEMA, model_digest, kv_dtype, kv_format, block_tokens)


def scope_key(root: bytes, salt: str = "", adapter: str = "", adapter_version: int = 0) -> bytes:
    return _digest(b"scope", root, salt, adapter, adapter_version)


def block_key(parent: bytes, tokens: Sequence[int], media: Media = ()) -> bytes:
    """`parent`: key of the block before, or the scope's key. Token ids are in [0, 2**32)."""
    count = len(tokens)
    data = _packer(len(parent), count)(b"block", len(parent), parent, count, *tokens)
    if media:
        data += _encode([field for item in media for field in item])
    return blake2b(data, digest_size=KEY_BYTES).digest()


@lru_cache(maxsize=64)
def _packer(parent_bytes: int, num_tokens: int) -> Callable[..., bytes]:
    return Struct(f"<5sB{parent_bytes}sI{num_tokens}I").pack


def chain(scope: bytes, tokens: Sequence[int], block_tokens: int) -> tuple[bytes, ...]:
    """Keys of the full blocks of `tokens`, in order."""
    keys = []
    parent = scope
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        parent = block_key(parent, tokens[start : start + block_tokens])
        keys.append(parent)
    return tuple(keys)


def _digest(*fields: bytes | str | int) -> bytes:
    return blake2b(_encode(fields), digest_size=KEY_BYTES).digest()


def _encode(fields: Sequence[bytes | str | int]) -> bytes:
    """Type tag and length before each field."""
    out = []
    for value in fields:
        if isinstance(value, int):
            out.append(b"i" + pack("<q", value))
        else:
            raw = value.encode() if isinstance(value, str) else value
            out.append((b"s" if isinstance(value, str) else b"b") + pack("<Q", len(raw)) + raw)
    return b"".join(out)

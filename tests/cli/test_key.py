"""`shoal key`: the key to whoever needs it, its digest to the file."""

from __future__ import annotations

import hashlib

import pytest
import yaml

from tests.support.command import flat, shoal_here


def test_the_key_is_shown_once_and_the_entry_has_its_digest():
    done = shoal_here("key", "acme", "--class", "interactive", "--class", "batch", "--tokens-per-minute", "6000")
    assert done.returncode == 0
    [line] = done.stderr.splitlines()
    key = line.removeprefix("the key, shown this once: ")
    assert len(key) > 40 and done.stdout.count(key) == 0
    assert yaml.safe_load(done.stdout) == [
        {
            "digest": f"sha256:{hashlib.sha256(key.encode()).hexdigest()}",
            "tenant": "acme",
            "classes": ["interactive", "batch"],
            "tokens_per_minute": 6000,
        }
    ]


def test_two_keys_differ_and_their_entries_make_one_list():
    first, second = shoal_here("key", "acme"), shoal_here("key", "globex", "--proxy", "--max-in-flight", "2")
    entries = yaml.safe_load(first.stdout + second.stdout)
    assert [(entry["tenant"], entry["classes"], entry.get("proxy")) for entry in entries] == [
        ("acme", ["standard"], None),
        ("globex", ["standard"], True),
    ]
    assert len({entry["digest"] for entry in entries}) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("key",), "Missing argument 'TENANT'"),
        (("key", "a b"), "tenant: Expected `str` matching regex"),
        (("key", ""), "tenant: Expected `str` matching regex"),
        (("key", "acme", "--max-in-flight", "0"), "--max-in-flight"),
    ],
)
def test_a_bad_value_is_named(arguments, message):
    done = shoal_here(*arguments)
    assert done.returncode == 2
    assert message in flat(done.stderr)
    assert done.stdout == ""

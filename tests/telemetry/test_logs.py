"""Log lines: one record, one line, whatever the values hold."""

from __future__ import annotations

import logging
import os
import re
import select
import subprocess
import sys

import pytest

from shoal.telemetry.logs import LineFormatter, escape


def line(event: str, fields: dict[str, object] | None = None, **extra: object) -> str:
    arguments: tuple[object, ...] = (fields,) if fields else ()
    record = logging.LogRecord("shoal.x", logging.WARNING, __file__, 1, event, arguments, None)
    vars(record).update(extra)
    return LineFormatter("engine-0").format(record)


def test_time_level_component_event_and_fields() -> None:
    found = line("engine.ready", {"blocks": 1000, "share": 0.5, "model": "a b", "path": "/x/y.z"})
    stamp, rest = found.split(" ", 1)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", stamp)
    assert rest == 'warning engine-0 engine.ready blocks=1000 share=0.5 model="a b" path=/x/y.z'


def test_extra_is_shown_like_fields() -> None:
    assert line("model.loaded", dtype="bfloat16").endswith("model.loaded dtype=bfloat16")


@pytest.mark.parametrize("evil", ["a\nb", "a\r\nb", "\x1b[2J", "\u2028", "\x85", "\x00", "\x7f"])
def test_no_value_can_forge_a_line_or_steer_a_terminal(evil: str) -> None:
    for found in (line(evil), line("e", {"k": evil}), line("e", k=evil)):
        assert len(found.splitlines()) == 1
        assert all(char.isprintable() for char in found)


def test_quotes_and_backslashes_cannot_end_a_value() -> None:
    assert line("e", {"k": 'a" level=info x="'}).endswith(r'k="a\" level=info x=\""')
    assert line("e", {"k": "a b\\"}).endswith(r'k="a b\\"')


def test_long_values_are_cut() -> None:
    assert len(line("e", {"k": "x" * 10_000})) < 600


def test_percent_signs_are_no_placeholders() -> None:
    assert line("100 %d", {"k": "50 %s"}).endswith('100 %d k="50 %s"')


def test_a_traceback_follows_indented() -> None:
    try:
        raise ValueError("a\nforged line")
    except ValueError as e:
        record = logging.LogRecord("shoal.x", logging.ERROR, __file__, 1, "bad", (), (ValueError, e, e.__traceback__))
    first, *rest = LineFormatter("x").format(record).splitlines()
    assert first.endswith("error x bad")
    assert rest and all(text.startswith("  | ") for text in rest)


def test_escape_keeps_other_scripts() -> None:
    assert escape("鱼群 é 🐟") == "鱼群 é 🐟"


FLOOD = """
import logging, os
from shoal.telemetry import logs
logs.setup("x")
for number in range(5000):
    logging.getLogger().info("an.event", {"number": number, "text": "é" * 300})
os.write(1, b"done")
os.read(0, 1)
logging.getLogger().info("the.last")
"""


def test_a_reader_that_stops_loses_lines_and_holds_up_nobody() -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", FLOOD], stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdout is not None and process.stderr is not None
        done, _, _ = select.select([process.stdout], [], [], 20)
        if not done:
            process.kill()
        assert done, "it waits for its reader"
        os.set_blocking(process.stderr.fileno(), False)
        early = process.stderr.read()
        assert early.count(b"an.event") > 10
        os.set_blocking(process.stderr.fileno(), True)
        _, late = process.communicate(b"x", timeout=20)
        assert re.search(rb"log\.lines_lost lines=\d+\n.* the\.last\n", late)


def test_a_full_disk_does_not_end_the_process() -> None:
    with open("/dev/full", "wb") as full:
        process = subprocess.run(
            [sys.executable, "-c", FLOOD], input=b"x", stdout=subprocess.PIPE, stderr=full, timeout=20
        )
    assert process.returncode == 0 and process.stdout == b"done"
